"""The kernel of `between_attentions`: weights never stop streaming while the products wait for one another.

In a CTA one warp fetches boxes of weights, of all products one after the other, as far ahead as shared memory allows; one
fetches the rows of x that meet them, once the product before is finished; one makes 1 / rms of these rows; eight multiply, and
finish tiles.  Where the attention's parts are to be merged, these begin with that, and one warp adds up what they make of it.
An early launch fetches weights while the kernel before it still makes the first product's x, or the parts.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_fetch import Maps, fetch_weights, fetch_x, make_rms
from dspark_kernels.cute.between_attentions_finish import finish_tile, load_ahead, prepare_rows, publish
from dspark_kernels.cute.between_attentions_meet import Shared, allocate, pass_on, set_up, this_launch
from dspark_kernels.cute.between_attentions_multiply import hold, multiply_tile
from dspark_kernels.cute.between_attentions_schedule import (
    WARPS,
    Context,
    Eps,
    Into,
    Rows,
    Weights,
    Workspace,
    first_tile,
    tiles_of,
)
from dspark_kernels.cute.between_attentions_values import add_units, multiply_units
from dspark_kernels.cute.block_attention_schedule import Requests
from dspark_kernels.cute.block_attention_schedule import Workspace as Parts

THREADS = (WARPS + 4) * 32
MULTIPLY_REGISTERS, FETCH_REGISTERS = 216, 72  # together those of the launch, 168 a thread


@cute.jit
def _make_tiles(
    shared: Shared, requests: Requests, parts: Parts, weights: Weights, rows: Rows, into: Into, work: Workspace, num_rows,
    num_context, facts: cutlass.Constexpr,
):  # fmt: skip
    """Eight warps: this CTA's tiles of all products."""
    cta, _, _ = cute.arch.block_idx()
    done, x_done, launch = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if cutlass.const_expr(facts.attention is not None):
        done = multiply_units(shared, requests, parts, work, facts)
        # Room for more boxes now would have the other CTAs' sums wait behind them: 244 us a block decode with 2K, 241 so.
        cute.arch.mbarrier_wait(shared.added, 0)
        launch = shared.launch[0]
    elif cutlass.const_expr(not facts.behind and facts.following):
        cute.arch.griddepcontrol_wait()
        prepare_rows(weights, rows, work, num_rows, facts)
        pass_on(shared.multiplied)
    held = hold(shared, done, facts)
    cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(facts.attention is None):
        launch = this_launch(work, facts)  # which is known when the launch before has ended
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        if cutlass.const_expr(facts.early and index == len(facts.products) - 1):
            # The next attention's CTAs, where CTAs of this launch have ended.  When this launch began, it is no help: a block
            # decode with 2K took 232 us so, 224 as it is, 233 behind the last product.  It has to be behind the wait: what came
            # before this launch has then ended, and the attention reads context that it may have stored.
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(index > 0 and facts.awaited(index) is not None):  # noqa: SIM102 (decided when it is built, the next on the device)
            if first_tile(cta, index, facts) < product.tiles:
                cute.arch.mbarrier_wait(shared.ready + index, 0)
        for tile in cutlass.range(first_tile(cta, index, facts), product.tiles, facts.ctas, unroll=1):
            count = num_context if product.name == "context" else num_rows
            loaded = load_ahead(weights, rows, into, tile, count, index, facts)
            multiply_tile(shared, held if index == 0 else None, done, x_done, product, facts)
            if cutlass.const_expr(product.normed):
                cute.arch.mbarrier_wait(shared.normed + index, 0)
            finish_tile(shared, rows, work, tile, count, loaded, index, facts)
            done += product.boxes
            x_done += product.x_fetches
        publish(work, launch, tiles_of(cta, index, facts), index, facts)


@cute.kernel
def between_attentions_kernel(
    weight_maps: list[list[Maps]],
    x_maps: list[Maps],
    matrix: list[Maps],
    requests: Requests,
    parts: Parts,
    weights: Weights,
    rows: Rows,
    into: Into,
    context: Context,
    work: Workspace,
    num_rows: cutlass.Int32,
    eps: Eps,
    facts: cutlass.Constexpr,
):
    """weight_maps, x_maps: of each product, of its one weight or its two, and of its x; matrix, requests, parts: of the
    attention, where its parts are merged."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = allocate(facts)
    if thread == 0:
        set_up(shared, facts)
    cute.arch.sync_threads()
    if warp < WARPS:
        cute.arch.setmaxregister_increase(MULTIPLY_REGISTERS)
        _make_tiles(shared, requests, parts, weights, rows, into, work, num_rows, context.rows, facts)
    else:
        cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
        if warp == WARPS:
            fetch_weights(weight_maps, matrix, requests.batch, shared, facts)
        if warp == WARPS + 1:
            fetch_x(x_maps, shared, work, facts)
        if warp == WARPS + 2:
            make_rms(shared, weights, rows, into, work, num_rows, eps, facts)
        if warp == WARPS + 3:
            add_units(shared, requests.batch, rows, context, work, eps.context, facts)
