"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs, and waits for its end
(CUDA programming guide, "Programmatic Dependent Launch")."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_then_let_next_in(PROGRAMMATIC: tl.constexpr):
    """Behind this, all that the kernel before has stored is there; what lies in front of it may read weights alone, if its op
    says no more.

    The next kernel is let in behind the wait: so it may count on all before this kernel having ended when it begins.
    """
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
