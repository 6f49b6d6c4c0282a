"""Where frames go: files, TensorBoard, Prometheus."""
