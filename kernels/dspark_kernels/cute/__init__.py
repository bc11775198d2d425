"""CuTe DSL kernels, one op a file."""
