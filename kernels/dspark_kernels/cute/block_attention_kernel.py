"""The first kernel of the block attention: a CTA's way to its part of the key tiles, in the schedule that the build has.

`facts` is a `block_attention_facts.Facts`.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from dspark_kernels.cute import block_attention_fetch, block_attention_seesaw_fetch
from dspark_kernels.cute.block_attention_device import consume
from dspark_kernels.cute.block_attention_schedule import (
    CONSUMERS,
    WARP,
    Queries,
    Requests,
    Workspace,
    first_slots,
    list_of,
    share_of,
    taker_of,
)
from dspark_kernels.cute.block_attention_seesaw import GROUP, consume_in_turn

FETCH_REGISTERS, CONSUME_REGISTERS = 40, 232


def memory_of(facts):
    """The module that owns the shared memory of a build, and the way of key tiles into it."""
    return block_attention_seesaw_fetch if facts.seesaw else block_attention_fetch


@cute.kernel
def block_attention_kernel(
    tma_atom: cute.CopyAtom,
    tma_tensor: cute.Tensor,  # [page_size, D, pages]
    query_atom: cute.CopyAtom,
    query_tensor: cute.Tensor,  # [N * heads, D, B]
    queries: Queries,
    requests: Requests,
    work: Workspace,
    scale: cutlass.Float32,  # times log2(e)
    facts: cutlass.Constexpr,
):
    """A CTA takes its part of the list of key tiles and leaves what it has of each pair in the workspace."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == CONSUMERS // WARP:
        cpasync.prefetch_descriptor(tma_atom)
        if cutlass.const_expr(facts.fetch_queries):
            cpasync.prefetch_descriptor(query_atom)
    shared = memory_of(facts).allocate(facts)
    if thread == 0:
        memory_of(facts).set_up_barriers(shared, facts)
    if cutlass.const_expr(not facts.early):
        cute.arch.griddepcontrol_wait()
        # The merge's CTAs take the multiprocessors that are left, or those that become free, and wait there for all parts.
        # Behind the wait: they read lengths at once.
        cute.arch.griddepcontrol_launch_dependents()
    slots = first_slots(requests, facts)
    listed = list_of(requests, facts)
    takers, taker, half = taker_of(listed.places, cta, facts)
    place, last = share_of(requests, listed, taker, facts)
    cute.arch.sync_threads()

    if warp >= CONSUMERS // WARP:
        cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
        if warp > CONSUMERS // WARP:
            place = last
        fetched = (tma_atom, tma_tensor, query_atom, query_tensor)
        block_attention_fetch.fetch(
            *fetched, requests, shared, slots, place, last, listed, memory_of(facts).fetch_tile, facts
        )  # fmt: skip
    else:
        cute.arch.setmaxregister_increase(CONSUME_REGISTERS)
        if cutlass.const_expr(facts.early and not facts.fetch_queries):
            cute.arch.griddepcontrol_wait()
        here = (queries, requests, work, shared, taker, place, last, listed, scale)
        if cutlass.const_expr(not facts.seesaw):
            consume(*here, takers, half, facts)
        elif warp < GROUP // WARP:  # a build for each: where they read and write is known, and takes no register
            consume_in_turn(*here, 0, facts)
        else:
            consume_in_turn(*here, 1, facts)
