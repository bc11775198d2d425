"""Device code only: tensors and numbers in, tensors out.

Nothing here imports `dspark_model`.  Contracts, references, checks and the choice of a kernel live in `dspark_model/ops`,
under the same stem.  A kernel module is imported only where its op is dispatched, so that neither triton nor cutlass is
needed to use the package.
"""
