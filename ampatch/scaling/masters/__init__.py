"""FP32 master weights beside their half weights: values, writes, gradients."""
