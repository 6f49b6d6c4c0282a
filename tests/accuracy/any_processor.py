"""Kernels that compute the same bits on every x86 processor, for processes whose numbers are held against kept ones.

torch picks its kernels, and MKL and oneDNN pick theirs, by what the processor has (AVX2, AVX512, bfloat16): other orders of sums, fused
multiplications or not, so measured errors differ, and even a verdict beside its threshold. These variables make the choice the same; they
are read when torch is imported, so they are those of a new process.
"""

from __future__ import annotations

KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "DNNL_MAX_CPU_ISA": "SSE41",  # the older name
    "OMP_NUM_THREADS": "1",  # parts of a sum
    "MKL_NUM_THREADS": "1",
}
"""Environment. What is left to the processor: functions of libm in float64, whose last bit hangs on fused multiplication."""
