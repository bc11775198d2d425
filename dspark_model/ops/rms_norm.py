"""RMS normalisation."""

import torch

from dspark_model.ops.programmatic import programmatic_launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: str = "torch") -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    x: [..., H]; weight: [H].  Computed in float32 with the weight, rounded once to x's dtype.
    backend: `torch`; or `triton`, one kernel, which sums the squares in another order: within 1e-6 relative, so that a rounded
    bf16 value differs by at most one step.  From Hopper on it begins while the kernel before it on the stream still runs, if
    that one allows it (programmatic dependent launch), and reads the weight, which must have been complete then.
    """
    if backend == "triton":
        return _triton(x, weight, eps)
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


def _triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    import triton
    from dspark_kernels.triton.rms_norm import rms_norm_kernel

    if x.stride(-1) != 1:
        raise ValueError(f"values of a row lie {x.stride(-1)} apart, wanted side by side")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    if flat.numel():
        lanes = triton.next_power_of_2(width)
        warps = min(16, max(4, lanes // 512))
        rms_norm_kernel[(flat.shape[0],)](
            flat, flat.stride(0), weight, out, eps, WIDTH=width, LANES=lanes, num_warps=warps, **programmatic_launch(x.device)
        )  # fmt: skip
    return out
