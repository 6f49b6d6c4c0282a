"""MindSpore's static graph: Cells inside compiled code (`dump`), single tensors (`single`), kernels (`kernel_dump`)."""
