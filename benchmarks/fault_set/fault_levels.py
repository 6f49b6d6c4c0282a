"""What is true about the defects where only modules are recorded (level L0).

The culprit is the innermost module that holds the defect. A defect outside of all modules (the loss, the update, the reduction of
gradients) shows first in the module that takes in what it has made: the last one's backward pass, or the module of the parameter in the
next step.
"""

from __future__ import annotations

_ATTENTION = r"Module\.layers\.1\.attention\.Attention\.forward\.0"
_LOSS = r"Module\.head\.Linear\.backward\.0"

MODULES: dict[str, tuple[str, int]] = {
    "wrong eps of a norm": (r"Module\.layers\.1\.norm2\.Norm\.forward\.0", 0),
    "attention mask one off": (_ATTENTION, 0),
    "gradient scaled by 1.3": (r"Module\.layers\.1\.(mlp\.up\.Linear|norm2\.Norm)\.backward\.0", 0),
    "weight loaded transposed": (r"Module\.layers\.0\.attention\.proj\.Linear\.forward\.0", 0),
    "norm gradients not summed over the sequence": (r"Module\.(.*\.)?norm\d?\.Norm\.forward\.0", 1),
    "rotary cache stale in the second step": (r"Module\.layers\.0\.attention\.rope\.Rope\.forward\.0", 1),
    "one product accumulated in bf16": (r"Module\.layers\.1\.mlp\.down\.Linear\.forward\.0", 0),
    "rotary base": (r"Module\.layers\.0\.attention\.rope\.Rope\.forward\.0", 0),
    "query and key swapped": (_ATTENTION, 0),
    "query and key weights swapped": (r"Module\.layers\.1\.attention\.qkv\.Linear\.forward\.0", 0),
    "loss not divided by the micro batches": (_LOSS, 0),
    "the same micro batch twice": (r"Module\.embedding\.Embedding\.forward\.1", 0),
    "labels shifted": (_LOSS, 0),
    "a gradient not averaged over data-parallel ranks": (r"Module\.layers\.1\.mlp\.up\.Linear\.forward\.0", 1),
    "dropout differs over tensor-parallel ranks": (r"Module\.layers\.0\.(attention\.)?drop\.Dropout\.forward\.0", 0),
    "one rank's collective corrupted": (r"Module\.layers\.1\.attention\.proj\.Linear\.forward\.0", 0),
    "missing sum after a row-parallel product": (r"Module\.layers\.1\.mlp\.down\.Linear\.forward\.0", 0),
    "missing sum of gradients before a column-parallel product": (r"Module\.layers\.1\.(mlp\.up\.Linear|norm2\.Norm)\.backward\.0", 0),
    "NaN in a fused softmax": (_ATTENTION, 0),
    "overflow in float16 scores": (_ATTENTION, 0),
    "overflow in a float16 gradient": (r"Module\.layers\.2\.mlp\.(down\.Linear|Mlp)\.backward\.0", 0),
    "scores not scaled": (_ATTENTION, 0),
    "other gelu formula": (r"Module\.layers\.1\.mlp\.Mlp\.forward\.0", 0),
    "residual lost": (r"Module\.layers\.1\.Block\.forward\.0", 0),
    "heads merged without transposing": (_ATTENTION, 0),
    "branch detached": (r"Module\.layers\.1\.mlp\.Mlp\.(for|back)ward\.0", 0),
    "softmax in bf16": (_ATTENTION, 0),
    "one weight scaled at start": (r"Module\.layers\.2\.mlp\.up\.Linear\.forward\.0", 0),
    "a norm writes into its input": (r"Module\.layers\.1\.norm2\.Norm\.forward\.0", 0),
    "positions one off": (r"Module\.layers\.1\.attention\.rope\.Rope\.forward\.0", 0),
    "dropout of one block with another p": (r"Module\.layers\.1\.drop\.Dropout\.forward\.0", 0),
    "learning rate doubled": (r"Module\.embedding\.Embedding\.forward\.0", 1),
    "one parameter not updated": (r"Module\.layers\.1\.mlp\.up\.Linear\.forward\.0", 1),
    "loss taken in bf16": (_LOSS, 0),
    "a token taken for padding": (_LOSS, 0),
    "one rank reads another token": (r"Module\.embedding\.Embedding\.forward\.0", 0),
    # the network of fault_mixture.py
    "batch norm left in evaluation": (r"Module\.blocks\.1\.norm1\.BatchNorm2d\.forward\.0", 0),
    "running statistics of another momentum": (r"Module\.blocks\.0\.norm2\.BatchNorm2d\.forward\.0", 1),
    "residual of one block lost": (r"Module\.blocks\.1\.Residual\.forward\.0", 0),
    "sharper gate": (r"Module\.mixture\.Mixture\.forward\.0", 0),
    "one expert's weight scaled by 1.001": (r"Module\.mixture\.experts\.2\.down\.Linear\.forward\.\d", 0),
    "recurrent weights negated": (r"Module\.gru\.GRU\.forward\.0", 0),
    "label smoothing": (_LOSS, 0),
    "momentum of the optimizer": (r"Module\.stem\.Conv2d\.forward\.0", 2),
    "one gradient clamped": (r"Module\.head\.Linear\.forward\.0", 1),
    "data scaled by 1.0001 from the second step on": (r"Module\.stem\.Conv2d\.forward\.0", 1),
    "one gradient becomes NaN": (r"Module\.gru\.GRU\.forward\.0", 2),
    "eps of a norm": (r"Module\.norm\.RMSNorm\.forward\.0", 0),
}
"""Case -> (pattern of the records that are right, step in which it shows first)."""
