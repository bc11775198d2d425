"""The one table from a device to what is built for it; needs no package."""

# Compute capability to build.  The "a" builds run on exactly that capability, so a device never gets its neighbour's.
BUILDS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (10, 7): "sm_107a"}


def build_architecture(capability: tuple[int, int]) -> str:
    """The architecture to build for on a device of this compute capability.

    Raises:
        ValueError: nothing is built for it.
    """
    if capability not in BUILDS:
        known = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in BUILDS.items())
        major, minor = capability
        raise ValueError(
            f"the CuTe DSL kernels are not built for compute capability {major}.{minor}, only for {known}; choose triton"
        )
    return BUILDS[capability]
