"""The fast paths: native code for what stock kernels leave slow, each with its plain torch twin."""
