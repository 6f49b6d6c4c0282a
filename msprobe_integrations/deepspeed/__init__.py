"""DeepSpeed: the parameter side of the monitor for ZeRO 0 to 3.

=============  =====================================================================================================================
`shards`       where every parameter lies in the buffers of DeepSpeed's optimizers (fp32, fp16, bf16, ZeRO 1, 2 and 3, offload)
`replicas`     which parameters are equal on which ranks
`source`       gradients, parameters, states and settings of the optimizer for the generic watch of `msprobe_integrations.torch`, and
               the moments of a step
=============  =====================================================================================================================

Nothing is imported from DeepSpeed but the table of its process groups: the objects that are passed tell what they are.
"""
