"""Trainings under every framework as rows of data, with what a probe says of them held against what a spy saw without one.

A case is a row, ``TrainingCase("transformers", model="gpt_tiny", parallelism={"dp": 2}, features=("accumulation",))``; `training_case` in
`run` trains it in its ranks and `checks` says what must be true of it. To add

* a case: one more row in a test, with names that its framework's module knows (its docstring lists them);
* a fault: a function in `faults` (or in the test) that changes model, optimizer, data or launch code of the case, never the tool, wrapped
  in a `Fault`; a row names it as ``fault=...``;
* a model: an entry of `models.MODELS`; it is trained by hand in float64 there, so that no framework has to be believed;
* a framework: a module of `frameworks` with ``ARM`` (what the environment arms), ``SCALARS`` (what each step has) and
  ``train(training)``, which tells the `Training` of the model before it is wrapped, of the moment before clipping, and of each update,
  and returns what must be the same bits with a probe.

A fault inside the probe itself is planted by `probe_faults`. The folder above is put on the path: ``from harness.case import
TrainingCase``.
"""
