"""Paged decode for Hopper in CuTe DSL: a program attends to one work item for one key head.

    scores^T  [keys, rows] = K [keys, D] . Q^T [D, rows]
    out^T     [E, rows]    = V^T [E, keys] . P^T [keys, rows]

Keys are the 64 rows of a warpgroup's matrix instruction and the few query rows its columns, so that
no row is padding where a group has 8 heads or more; K and V^T are read from shared memory as they
lie there. One warpgroup computes; one warp (bulk copies, boxes of min(page, 64) keys) or one
warpgroup (16-byte copies, any page) loads, `STAGES` tiles ahead. Records of items are those of
`attend`; partial results go to `combine`.

    row          n of TILE_M: flat = row + n, query flat // group, head flat % group
    softmax      base 2, running maximum per row over all keys of a tile
    latent       one row of D channels is key and, in its first E, value: loaded once

Keys outside [lo, hi) may hold anything, and boxes past the last page are not loaded: their scores
are masked, and their rows of V, which a weight of zero would not silence, are cleared."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import MmaF16BF16Op, OperandSource, SmemLayoutAtomKind

KEYS = 64  # of a tile: rows of the matrix instruction
BLOCK = 64  # channels of a swizzled row of 128 bytes
WARPGROUP = 128
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
_COLUMNS = {8: SmemLayoutAtomKind.MN_INTER, 16: SmemLayoutAtomKind.MN_SW32}
_COLUMNS |= {32: SmemLayoutAtomKind.MN_SW64, 64: SmemLayoutAtomKind.MN_SW128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """All that the kernel is specialised for. `tile_m`: query rows of a program, 8, 16, 32 or 64.
    `single`: one causal query a sequence, whose bounds are the item's."""

    half: str
    tile_m: int
    stages: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    page: int
    latent: bool
    single: bool
    window: bool
    softcap: bool
    sink: bool
    bulk: bool

    @property
    def loaders(self) -> int:
        return 32 if self.bulk else WARPGROUP


class DecodeSm90:
    """The kernel of one `Spec`."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.half]
        self.box = min(spec.page, KEYS) if spec.bulk else KEYS

    def _rows_layout(self, rows: int, dim: int, stages: int) -> cute.ComposedLayout:
        """[rows, dim, stages] of K-major rows: 64 channels of all rows, then the next 64."""
        return cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout(
                ((8, rows // 8), (BLOCK, dim // BLOCK), stages),
                stride=((BLOCK, 8 * BLOCK), (1, rows * BLOCK), rows * dim),
            ),
        )

    def _boxes_layout(self, dim: int) -> cute.ComposedLayout:
        """The same tile as [box, dim, boxes, stages]."""
        box = self.box
        return cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout(
                ((8, box // 8), (BLOCK, dim // BLOCK), KEYS // box, self.spec.stages),
                stride=((BLOCK, 8 * BLOCK), (1, KEYS * BLOCK), box * BLOCK, KEYS * dim),
            ),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, H, D]
        mK: cute.Tensor,  # [N, P, K, D]
        mV: cute.Tensor,  # [N, P, K, E]
        mSink: cute.Tensor | None,  # [H]
        mOut: cute.Tensor,  # [T, H, E]
        mLse: cute.Tensor,  # [T, H]
        mPart: cute.Tensor,  # [slots * K * TILE_M, E]
        mPartLse: cute.Tensor,  # [slots * K * TILE_M]
        mTable: cute.Tensor,  # [B, W]
        mItems: cute.Tensor,  # [I, 9]
        window: Int32,
        qk_scale: Float32,
        exp_scale: Float32,
        stream: cuda.CUstream,
    ):
        spec, dtype = self.spec, self.dtype
        n = spec.tile_m
        qk_op = MmaF16BF16Op(
            dtype, Float32, (KEYS, n, 16), OperandSource.SMEM, OperandMajorMode.K,
            OperandMajorMode.K,
        )  # fmt: skip
        pv_op = MmaF16BF16Op(
            dtype, Float32, (BLOCK, n, 16), OperandSource.SMEM, OperandMajorMode.MN,
            OperandMajorMode.MN,
        )  # fmt: skip
        tiled_qk = cute.make_tiled_mma(qk_op)
        tiled_pv = cute.make_tiled_mma(pv_op)
        q_layout = self._rows_layout(n, spec.dim, 1)
        k_layout = self._rows_layout(KEYS, spec.dim, spec.stages)
        v_layout = self._rows_layout(KEYS, spec.dim if spec.latent else spec.dim_v, spec.stages)
        p_layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(_COLUMNS[n], dtype), (n, KEYS), order=(0, 1)
        )

        @cute.struct
        class Storage:
            full_k: cute.struct.MemRange[Int64, spec.stages]
            full_v: cute.struct.MemRange[Int64, spec.stages]
            empty: cute.struct.MemRange[Int64, spec.stages]
            warps: cute.struct.Align[cute.struct.MemRange[Float32, 4 * n], 16]
            q: cute.struct.Align[cute.struct.MemRange[dtype, n * spec.dim], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, n * KEYS], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, spec.stages * KEYS * spec.dim], 1024]
            v: cute.struct.Align[
                cute.struct.MemRange[dtype, 0 if spec.latent else spec.stages * KEYS * spec.dim_v],
                1024,
            ]

        self.storage = Storage
        atom_k, tma_k, atom_v, tma_v = None, None, None, None
        if const_expr(spec.bulk):
            op = cpasync.CopyBulkTensorTileG2SOp()
            atom_k, tma_k = cpasync.make_tiled_tma_atom(
                op,
                cute.make_tensor(mK.iterator, cute.select(mK.layout, [1, 3, 2, 0])),
                cute.select(self._boxes_layout(spec.dim), [0, 1]),
                (self.box, spec.dim),
            )
            if const_expr(not spec.latent):
                atom_v, tma_v = cpasync.make_tiled_tma_atom(
                    op,
                    cute.make_tensor(mV.iterator, cute.select(mV.layout, [1, 3, 2, 0])),
                    cute.select(self._boxes_layout(spec.dim_v), [0, 1]),
                    (self.box, spec.dim_v),
                )
        self.kernel(
            mQ, mK, mV, mSink, mOut, mLse, mPart, mPartLse, mTable, mItems, window, qk_scale,
            exp_scale, atom_k, tma_k, atom_v, tma_v, tiled_qk, tiled_pv, q_layout, k_layout,
            v_layout, p_layout,
        ).launch(
            grid=(mItems.shape[0] * spec.kv_heads, 1, 1),
            block=(WARPGROUP + spec.loaders, 1, 1),
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mSink: cute.Tensor | None,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPart: cute.Tensor,
        mPartLse: cute.Tensor,
        mTable: cute.Tensor,
        mItems: cute.Tensor,
        window: Int32,
        qk_scale: Float32,
        exp_scale: Float32,
        atom_k: cute.CopyAtom | None,
        tma_k: cute.Tensor | None,
        atom_v: cute.CopyAtom | None,
        tma_v: cute.Tensor | None,
        tiled_qk: cute.TiledMma,
        tiled_pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
    ):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kv_head = block % spec.kv_heads
        item = block // spec.kv_heads
        smem = cutlass.utils.SmemAllocator()
        storage = smem.allocate(self.storage)
        if mItems[item, 2] > 0:
            lo, hi = mItems[item, 5], mItems[item, 6]
            # A tile starts where a box does.
            start = lo
            if const_expr(spec.bulk):
                start = lo - lo % self.box
            count = cute.ceil_div(cutlass.max(hi - start, 0), KEYS)
            full_k, full_v = storage.full_k.data_ptr(), storage.full_v.data_ptr()
            empty = storage.empty.data_ptr()
            if warp == 0:
                arrivals = 1 if const_expr(spec.bulk) else WARPGROUP
                with cute.arch.elect_one():
                    for s in cutlass.range_constexpr(spec.stages):
                        cute.arch.mbarrier_init(full_k + s, arrivals)
                        cute.arch.mbarrier_init(full_v + s, arrivals)
                        cute.arch.mbarrier_init(empty + s, 4)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
            s_v = s_k
            if const_expr(not spec.latent):
                s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
            if warp < 4:
                s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
                s_p = storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner)
                self._load_queries(mQ, mItems, item, kv_head, storage.q.data_ptr(), thread)
                self._attend(
                    mSink, mOut, mLse, mPart, mPartLse, mItems, item, kv_head, window, qk_scale,
                    exp_scale, tiled_qk, tiled_pv, s_q, s_k, s_v, s_p, storage, start, count,
                )  # fmt: skip
            elif const_expr(spec.bulk):
                self._load_boxes(
                    mTable, mItems[item, 4], kv_head, atom_k, tma_k, atom_v, tma_v, storage,
                    start, hi, count,
                )  # fmt: skip
            else:
                self._load_rows(mTable, mItems[item, 4], kv_head, mK, mV, storage, start, hi, count)

    @cute.jit
    def _load_queries(self, mQ, mItems, item, kv_head, s_q: cute.Pointer, thread):
        """TILE_M rows of queries, 16 bytes at a time; rows that are not there are zero."""
        spec = self.spec
        group = const_expr(spec.heads // spec.kv_heads)
        q_row, row, rows = mItems[item, 0], mItems[item, 1], mItems[item, 2]
        pieces = const_expr(spec.dim // 8)
        for i in cutlass.range_constexpr(cute.ceil_div(spec.tile_m * pieces, WARPGROUP)):
            piece = i * WARPGROUP + thread
            if piece < spec.tile_m * pieces:
                n, c = piece // pieces, piece % pieces
                offset = (c // 8) * (spec.tile_m * BLOCK) + n * BLOCK + ((c % 8) ^ (n % 8)) * 8
                target = cute.make_tensor((s_q + offset).align(16), cute.make_layout(8))
                flat = row + n
                if flat < rows:
                    query, head = flat // group, kv_head * group + flat % group
                    source = self._piece(
                        mQ,
                        Int64(q_row + query) * mQ.stride[0]
                        + Int64(head) * mQ.stride[1]
                        + Int64(c * 8),
                    )
                    cute.autovec_copy(source, target)
                else:
                    target.fill(self.dtype(0.0))

    @cute.jit
    def _piece(self, tensor: cute.Tensor, offset: Int64):
        """16 bytes of global memory."""
        pointer = cute.make_ptr(
            self.dtype, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(8))

    @cute.jit
    def _load_boxes(
        self, mTable, base, kv_head, atom_k, tma_k, atom_v, tma_v, storage, start, hi, count
    ):
        """One warp: each lane looks one box's page up, for 32 boxes at a time."""
        spec = self.spec
        box = const_expr(self.box)
        boxes = const_expr(KEYS // box)
        k_boxes = self._boxes_layout(spec.dim)
        s_k = storage.k.get_tensor(k_boxes.outer, swizzle=k_boxes.inner)
        g_k = cute.local_tile(tma_k[None, None, kv_head, None], (box, spec.dim), (None, 0, None))
        to_k, from_k = cpasync.tma_partition(
            atom_k, 0, cute.make_layout(1), cute.group_modes(s_k, 0, 2), cute.group_modes(g_k, 0, 2)
        )
        if const_expr(not spec.latent):
            v_boxes = self._boxes_layout(spec.dim_v)
            s_v = storage.v.get_tensor(v_boxes.outer, swizzle=v_boxes.inner)
            g_v = cute.local_tile(
                tma_v[None, None, kv_head, None], (box, spec.dim_v), (None, 0, None)
            )
            to_v, from_v = cpasync.tma_partition(
                atom_v, 0, cute.make_layout(1), cute.group_modes(s_v, 0, 2),
                cute.group_modes(g_v, 0, 2),
            )  # fmt: skip
        full_k, full_v = storage.full_k.data_ptr(), storage.full_v.data_ptr()
        empty = storage.empty.data_ptr()
        lane = cute.arch.lane_idx()
        last = hi - 1
        page = Int32(0)
        for i in cutlass.range(count, unroll=1):
            first = i * boxes
            if first % 32 == 0:
                key = cutlass.min(start + (first + lane) * box, last)
                page = mTable[base, key // spec.page]
            stage = i % spec.stages
            cute.arch.mbarrier_wait(empty + stage, 1 - (i // spec.stages) % 2)
            n0 = start + i * KEYS
            live = cutlass.min(cute.ceil_div(hi - n0, box), boxes)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_k + stage, live * (box * spec.dim * 2))
            for b in cutlass.range_constexpr(boxes):
                if b < live:
                    at = cute.arch.shuffle_sync(page, (first + b) % 32)
                    sub = ((n0 + b * box) % spec.page) // box
                    cute.copy(
                        atom_k, from_k[None, sub, at], to_k[None, b, stage],
                        tma_bar_ptr=full_k + stage,
                    )  # fmt: skip
            if const_expr(not spec.latent):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        full_v + stage, live * (box * spec.dim_v * 2)
                    )
                for b in cutlass.range_constexpr(boxes):
                    if b < live:
                        at = cute.arch.shuffle_sync(page, (first + b) % 32)
                        sub = ((n0 + b * box) % spec.page) // box
                        cute.copy(
                            atom_v, from_v[None, sub, at], to_v[None, b, stage],
                            tma_bar_ptr=full_v + stage,
                        )  # fmt: skip

    @cute.jit
    def _load_rows(self, mTable, base, kv_head, mK, mV, storage, start, hi, count):
        """A warpgroup: 8 threads copy a row, each 16 bytes of every 64 channels. A tile is
        announced once the copies of `stages - 1` later ones are under way."""
        spec = self.spec
        lag = const_expr(spec.stages - 1)
        passes = const_expr(KEYS * 8 // WARPGROUP)
        thread = cute.arch.thread_idx()[0] - WARPGROUP
        full_k, full_v = storage.full_k.data_ptr(), storage.full_v.data_ptr()
        empty = storage.empty.data_ptr()
        pages = cute.make_rmem_tensor((passes,), Int32)
        for j in cutlass.range_constexpr(passes):
            key = cutlass.min(start + thread // 8 + j * 16, hi - 1)
            pages[j] = mTable[base, cutlass.max(key, 0) // spec.page] if count > 0 else Int32(0)
        for i in cutlass.range(count, unroll=1):
            stage = i % spec.stages
            n0 = start + i * KEYS
            cute.arch.mbarrier_wait(empty + stage, 1 - (i // spec.stages) % 2)
            for j in cutlass.range_constexpr(passes):
                row = thread // 8 + j * 16
                if n0 + row < hi:
                    within = (n0 + row) % spec.page
                    self._copy_row(
                        mK, pages[j], within, kv_head, spec.dim, storage.k.data_ptr(), stage, row,
                        thread % 8,
                    )  # fmt: skip
                    if const_expr(not spec.latent):
                        self._copy_row(
                            mV, pages[j], within, kv_head, spec.dim_v, storage.v.data_ptr(), stage,
                            row, thread % 8,
                        )  # fmt: skip
                key = cutlass.min(n0 + KEYS + row, hi - 1)
                pages[j] = mTable[base, key // spec.page]
            cute.arch.cp_async_commit_group()
            if i >= lag:
                cute.arch.cp_async_wait_group(lag)
                cute.arch.fence_view_async_shared()
                done = (i - lag) % spec.stages
                cute.arch.mbarrier_arrive(full_k + done)
                cute.arch.mbarrier_arrive(full_v + done)
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        for i in cutlass.range(cutlass.max(count - lag, 0), count, unroll=1):
            cute.arch.mbarrier_arrive(full_k + i % spec.stages)
            cute.arch.mbarrier_arrive(full_v + i % spec.stages)

    @cute.jit
    def _copy_row(self, pool, page, within, kv_head, dim, s_rows: cute.Pointer, stage, row, lane):
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL),
            self.dtype,
            num_bits_per_copy=128,
        )
        offset = (
            Int64(page) * pool.stride[0]
            + Int64(within) * pool.stride[1]
            + Int64(kv_head) * pool.stride[2]
            + Int64(lane * 8)
        )
        to = stage * (KEYS * dim) + row * BLOCK + (lane ^ (row % 8)) * 8
        for c in cutlass.range_constexpr(dim // BLOCK):
            target = cute.make_tensor(
                (s_rows + (to + c * KEYS * BLOCK)).align(16), cute.make_layout(8)
            )
            cute.copy(atom, self._piece(pool, offset + c * BLOCK), target)

    @cute.jit
    def _attend(
        self, mSink, mOut, mLse, mPart, mPartLse, mItems, item, kv_head, window, qk_scale,
        exp_scale, tiled_qk, tiled_pv, s_q, s_k, s_v, s_p, storage, start, count,
    ):  # fmt: skip
        """One warpgroup. A thread holds rows (2 lane columns + 0, 1) + 8 j of the tile, for keys
        (or channels) 16 warp + lane // 4 + 0, 8: its columns are the same in both products, so a
        row's maximum and factor are where they are needed."""
        spec = self.spec
        n = const_expr(spec.tile_m)
        group = const_expr(spec.heads // spec.kv_heads)
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        q_row, row, rows = mItems[item, 0], mItems[item, 1], mItems[item, 2]
        q_pos, lo, hi, slot = mItems[item, 3], mItems[item, 5], mItems[item, 6], mItems[item, 7]
        full_k, full_v = storage.full_k.data_ptr(), storage.full_v.data_ptr()
        empty = storage.empty.data_ptr()
        s_warps = cute.make_tensor(
            storage.warps.data_ptr(), cute.make_layout((4, n), stride=(1, 4))
        )

        thr_qk, thr_pv = tiled_qk.get_slice(thread), tiled_pv.get_slice(thread)
        a_k = tiled_qk.make_fragment_A(thr_qk.partition_A(s_k))
        b_q = tiled_qk.make_fragment_B(thr_qk.partition_B(s_q))
        # [dim_v, keys, stages]
        s_vt = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, [1, 0, 2]))
        if const_expr(spec.latent):
            s_vt = cute.make_tensor(
                s_v.iterator,
                cute.make_layout(
                    ((BLOCK, spec.dim_v // BLOCK), (8, KEYS // 8), spec.stages),
                    stride=((1, KEYS * BLOCK), (BLOCK, 8 * BLOCK), KEYS * spec.dim),
                ),
            )
        a_v = tiled_pv.make_fragment_A(thr_pv.partition_A(s_vt))
        b_p = tiled_pv.make_fragment_B(thr_pv.partition_B(s_p))
        scores = cute.make_rmem_tensor(tiled_qk.partition_shape_C((KEYS, n)), Float32)
        acc = cute.make_rmem_tensor(tiled_pv.partition_shape_C((spec.dim_v, n)), Float32)
        acc.fill(0.0)
        weights = cute.make_rmem_tensor(scores.shape, self.dtype)
        s_pt = cute.make_tensor(s_p.iterator, cute.select(s_p.layout, [1, 0]))
        to_p = thr_qk.partition_C(s_pt)

        columns = const_expr(n // 4)
        top = cute.make_rmem_tensor((columns,), Float32)
        total = cute.make_rmem_tensor((columns,), Float32)
        most = cute.make_rmem_tensor((columns,), Float32)
        top.fill(-Float32.inf)
        total.fill(0.0)
        if const_expr(spec.sink):  # noqa: SIM102  this one is decided when compiling
            if mItems[item, 8] > 0:
                for c in cutlass.range_constexpr(columns):
                    flat = row + self._column(c, lane)
                    if flat < rows:
                        top[c] = mSink[kv_head * group + flat % group] * LOG2_E
                        total[c] = Float32(1.0) if thread < 4 else Float32(0.0)
        # Tiles within are seen whole by every row.
        seen_lo, seen_hi = lo, hi
        if const_expr(not spec.single):
            seen_hi = cutlass.min(hi, q_pos + row // group + 1)
            if const_expr(spec.window):
                last_pos = q_pos + (cutlass.min(row + n, rows) - 1) // group
                seen_lo = cutlass.max(lo, last_pos - window)

        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
        for i in cutlass.range(count, unroll=1):
            stage, phase = i % spec.stages, (i // spec.stages) % 2
            n0 = start + i * KEYS
            cute.arch.mbarrier_wait(full_k + stage, phase)
            warpgroup.fence()
            for kk in cutlass.range_constexpr(spec.dim // 16):
                tiled_qk.set(warpgroup.Field.ACCUMULATE, kk != 0)
                cute.gemm(
                    tiled_qk, scores, a_k[None, None, kk, stage], b_q[None, None, kk, 0], scores
                )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(spec.softcap):
                for e in cutlass.range_constexpr(cute.size(scores)):
                    x = cute.arch.fmax(scores[e] * qk_scale, Float32(-30.0))
                    scores[e] = 2.0 / (1.0 + cute.math.exp2(x * (-2.0 * LOG2_E))) - 1.0
            if n0 < seen_lo or n0 + KEYS > seen_hi:
                for c in cutlass.range_constexpr(columns):
                    first, end = lo, hi
                    if const_expr(not spec.single):
                        pos = q_pos + (row + self._column(c, lane)) // group
                        end = cutlass.min(hi, pos + 1)
                        if const_expr(spec.window):
                            first = cutlass.max(lo, pos - window)
                    for h in cutlass.range_constexpr(2):
                        key = n0 + warp * 16 + lane // 4 + 8 * h
                        e = const_expr(4 * (c // 2) + 2 * h + c % 2)
                        scores[e] = scores[e] if key >= first and key < end else -Float32.inf
            # The tile's maximum of each row: of the thread's keys, of the warp's, of all.
            for c in cutlass.range_constexpr(columns):
                e = const_expr(4 * (c // 2) + c % 2)
                x = cute.arch.fmax(scores[e], scores[e + 2])
                for distance in cutlass.range_constexpr(3):
                    x = cute.arch.fmax(
                        x, cute.arch.shuffle_sync_bfly(x, offset=const_expr(4 << distance))
                    )
                most[c] = x
            if lane < 4:
                for c in cutlass.range_constexpr(columns):
                    s_warps[warp, self._column(c, lane)] = most[c]
            cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
            for c in cutlass.range_constexpr(columns):
                at = self._column(c, lane)
                x = cute.arch.fmax(
                    cute.arch.fmax(s_warps[0, at], s_warps[1, at]),
                    cute.arch.fmax(s_warps[2, at], s_warps[3, at]),
                )
                new = cute.arch.fmax(top[c], x * exp_scale)
                # A row that has seen no key yet: -inf minus -inf would be nan.
                shift = Float32(0.0) if new == -Float32.inf else new
                kept = cute.math.exp2(top[c] - shift, fastmath=True)
                top[c] = new
                for h in cutlass.range_constexpr(2):
                    e = const_expr(4 * (c // 2) + 2 * h + c % 2)
                    scores[e] = cute.math.exp2(scores[e] * exp_scale - shift, fastmath=True)
                e = const_expr(4 * (c // 2) + c % 2)
                total[c] = total[c] * kept + (scores[e] + scores[e + 2])
                for b in cutlass.range_constexpr(spec.dim_v // BLOCK):
                    for h in cutlass.range_constexpr(2):
                        a = const_expr(b * (n // 2) + 4 * (c // 2) + 2 * h + c % 2)
                        acc[a] = acc[a] * kept
            for e in cutlass.range_constexpr(cute.size(scores)):
                weights[e] = self.dtype(scores[e])
            cute.autovec_copy(weights, to_p)
            if const_expr(not spec.latent):
                cute.arch.mbarrier_wait(full_v + stage, phase)
            if n0 < lo or n0 + KEYS > hi:
                self._clear_rows(storage, stage, n0, lo, hi, thread)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
            warpgroup.fence()
            tiled_pv.set(warpgroup.Field.ACCUMULATE, True)
            for kk in cutlass.range_constexpr(KEYS // 16):
                cute.gemm(tiled_pv, acc, a_v[None, None, kk, stage], b_p[None, None, kk], acc)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)

        self._finish(
            mOut, mLse, mPart, mPartLse, acc, top, total, s_warps, kv_head, q_row, row, rows, slot
        )

    @cute.jit
    def _finish(
        self, mOut, mLse, mPart, mPartLse, acc, top, total, s_warps, kv_head, q_row, row, rows,
        slot,
    ):  # fmt: skip
        """Join the threads' denominators and write the rows: final, or fp32 with a base-2 lse."""
        spec = self.spec
        n = const_expr(spec.tile_m)
        group = const_expr(spec.heads // spec.kv_heads)
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        columns = const_expr(n // 4)
        for c in cutlass.range_constexpr(columns):
            x = total[c]
            for distance in cutlass.range_constexpr(3):
                x += cute.arch.shuffle_sync_bfly(x, offset=const_expr(4 << distance))
            total[c] = x
        # The last tile's maxima have been read by all.
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
        if lane < 4:
            for c in cutlass.range_constexpr(columns):
                s_warps[warp, self._column(c, lane)] = total[c]
        cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)
        for c in cutlass.range_constexpr(columns):
            at = self._column(c, lane)
            x = (s_warps[0, at] + s_warps[1, at]) + (s_warps[2, at] + s_warps[3, at])
            blind = x == 0.0
            one = Float32(1.0) if blind else x
            scale = Float32(0.0) if blind else 1.0 / x
            log = top[c] + cute.math.log2(one)
            flat = row + at
            channel = warp * 16 + lane // 4
            if slot < 0:
                if flat < rows:
                    query, head = q_row + flat // group, kv_head * group + flat % group
                    if thread < 4:
                        mLse[query, head] = log * LN_2
                    cell = Int64(query) * (spec.heads * spec.dim_v) + head * spec.dim_v
                    target = cute.make_tensor(mOut.iterator + cell, cute.make_layout(spec.dim_v))
                    for b in cutlass.range_constexpr(spec.dim_v // BLOCK):
                        for h in cutlass.range_constexpr(2):
                            a = const_expr(b * (n // 2) + 4 * (c // 2) + 2 * h + c % 2)
                            target[b * BLOCK + channel + 8 * h] = self.dtype(acc[a] * scale)
            else:
                cell = (Int64(slot) * spec.kv_heads + kv_head) * n + at
                if thread < 4:
                    mPartLse[cell] = log
                target = cute.make_tensor(
                    mPart.iterator + cell * spec.dim_v, cute.make_layout(spec.dim_v)
                )
                for b in cutlass.range_constexpr(spec.dim_v // BLOCK):
                    for h in cutlass.range_constexpr(2):
                        a = const_expr(b * (n // 2) + 4 * (c // 2) + 2 * h + c % 2)
                        target[b * BLOCK + channel + 8 * h] = acc[a] * scale

    @cute.jit
    def _clear_rows(self, storage, stage, n0, lo, hi, thread):
        """Zero the rows of V whose keys lie outside [lo, hi), 16 bytes a thread and pass."""
        spec = self.spec
        dim = const_expr(spec.dim if spec.latent else spec.dim_v)
        start = storage.k.data_ptr() if const_expr(spec.latent) else storage.v.data_ptr()
        for j in cutlass.range_constexpr(KEYS * 8 // WARPGROUP):
            row = thread // 8 + j * 16
            if n0 + row < lo or n0 + row >= hi:
                for c in cutlass.range_constexpr(spec.dim_v // BLOCK):
                    at = stage * (KEYS * dim) + c * (KEYS * BLOCK) + row * BLOCK + thread % 8 * 8
                    cute.make_tensor((start + at).align(16), cute.make_layout(8)).fill(
                        self.dtype(0.0)
                    )

    def _column(self, c: int, lane):
        """Row of the tile that a thread's column c is."""
        return 8 * (c // 2) + 2 * (lane % 4) + c % 2
