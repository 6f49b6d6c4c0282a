"""What is different on an Ascend NPU."""
