"""Where tensors lie, for kernels that read and write 16 bytes at once."""

import torch


def in_steps_of_16_bytes(tensor: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
