"""Block-sparse linear algebra for TensorFlow, on GPUs and CPUs."""
