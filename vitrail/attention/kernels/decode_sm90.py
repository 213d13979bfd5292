"""Paged decode for Hopper in CuTe DSL: a program attends to one work item for one key head, then
to the next.

    scores^T  [keys, rows] = K [keys, D] . Q^T [D, rows]
    out^T     [E, rows]    = V^T [E, keys] . P^T [keys, rows]

Keys are the 64 rows of a warpgroup's matrix instruction and the few query rows its columns, so that
no row is padding where a group has 8 heads or more; K and V^T are read from shared memory as they
lie there. One warpgroup computes (two share a latent tile of 64 rows); one warp (bulk copies, boxes
of min(page, 64) keys) or one warpgroup (16-byte copies, any page) loads, as many tiles ahead as
there are stages. Records of items are those of `attend`; partial results go to `combine`.

    row          n of TILE_M: flat = row + n, query flat // group, head flat % group
    softmax      base 2, running maximum per row over all keys of a tile
    latent       a row of E channels that is key and value, in V, and D - E rotary ones, in K

Keys outside [lo, hi) may hold anything, and boxes past the last page are not loaded: their scores
are masked, and their rows of V, which a weight of zero would not silence, are cleared."""

# The DSL traces these functions: what a name holds is not what its annotation says.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportPrivateImportUsage=false
# pyright: reportInvalidTypeArguments=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import MmaF16BF16Op, OperandSource, SmemLayoutAtomKind

from vitrail.attention.decode_spec import WARPGROUP, Spec

KEYS = 64  # of a tile: rows of the matrix instruction
BLOCK = 64  # channels of a swizzled row of 128 bytes
# A thread's, where two warpgroups compute: they take over from the one that loads.
MANY_REGISTERS, FEW_REGISTERS = 224, 56
LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
_COLUMNS = {8: SmemLayoutAtomKind.MN_INTER, 16: SmemLayoutAtomKind.MN_SW32}
_COLUMNS |= {32: SmemLayoutAtomKind.MN_SW64, 64: SmemLayoutAtomKind.MN_SW128}


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

    def _boxes_layout(self, dim: int, stages: int) -> cute.ComposedLayout:
        """The same tile as [box, dim, boxes, stages]."""
        box = self.box
        return cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout(
                ((8, box // 8), (BLOCK, dim // BLOCK), KEYS // box, stages),
                stride=((BLOCK, 8 * BLOCK), (1, KEYS * BLOCK), box * BLOCK, KEYS * dim),
            ),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [T, H, D]
        mK: cute.Tensor,  # [N, P, K, D], of latents the rotary channels
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
        max_programs: Int32,
        stream: cuda.CUstream,
    ):
        spec, dtype = self.spec, self.dtype
        n = spec.tile_m
        qk_op = MmaF16BF16Op(
            dtype, Float32, (KEYS, n // spec.groups, 16), OperandSource.SMEM, OperandMajorMode.K,
            OperandMajorMode.K,
        )  # fmt: skip
        pv_op = MmaF16BF16Op(
            dtype, Float32, (BLOCK, n, 16), OperandSource.SMEM, OperandMajorMode.MN,
            OperandMajorMode.MN,
        )  # fmt: skip
        tiled_qk = cute.make_tiled_mma(qk_op)
        tiled_pv = cute.make_tiled_mma(pv_op)
        q_layout = self._rows_layout(n, spec.dim, 1)
        k_layout = self._rows_layout(KEYS, spec.key_dim, spec.key_stages)
        v_layout = self._rows_layout(KEYS, spec.dim_v, spec.stages)
        p_tile = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(_COLUMNS[n], dtype), (n, KEYS), order=(0, 1)
        )
        p_stages, p_stride = (2, KEYS * spec.key_dim) if spec.latent else (1, 0)
        p_layout = cute.make_composed_layout(
            p_tile.inner,
            0,
            cute.make_layout(
                (*p_tile.outer.shape, p_stages), stride=(*p_tile.outer.stride, p_stride)
            ),
        )

        @cute.struct
        class Storage:
            full_k: cute.struct.MemRange[Int64, spec.key_stages]
            empty_k: cute.struct.MemRange[Int64, spec.key_stages]
            full_v: cute.struct.MemRange[Int64, spec.stages]
            empty_v: cute.struct.MemRange[Int64, spec.stages]
            warps: cute.struct.Align[cute.struct.MemRange[Float32, 4 * n], 16]
            rows: cute.struct.Align[cute.struct.MemRange[Float32, n], 16]
            q: cute.struct.Align[cute.struct.MemRange[dtype, n * spec.dim], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, 0 if spec.latent else n * KEYS], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], 1024]

        self.storage = Storage
        atom_k, tma_k, atom_v, tma_v = None, None, None, None
        if const_expr(spec.bulk):
            op = cpasync.CopyBulkTensorTileG2SOp()
            atom_k, tma_k = cpasync.make_tiled_tma_atom(
                op,
                cute.make_tensor(mK.iterator, cute.select(mK.layout, [1, 3, 2, 0])),
                cute.select(self._boxes_layout(spec.key_dim, spec.key_stages), [0, 1]),
                (self.box, spec.key_dim),
            )
            atom_v, tma_v = cpasync.make_tiled_tma_atom(
                op,
                cute.make_tensor(mV.iterator, cute.select(mV.layout, [1, 3, 2, 0])),
                cute.select(self._boxes_layout(spec.dim_v, spec.stages), [0, 1]),
                (self.box, spec.dim_v),
            )
        self.kernel(
            mQ, mK, mV, mSink, mOut, mLse, mPart, mPartLse, mTable, mItems, window, qk_scale,
            exp_scale, atom_k, tma_k, atom_v, tma_v, tiled_qk, tiled_pv, q_layout, k_layout,
            v_layout, p_layout,
        ).launch(
            grid=(cutlass.min(mItems.shape[0] * spec.kv_heads, max_programs), 1, 1),
            block=(spec.groups * WARPGROUP + spec.loaders, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
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
        programs, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        if warp == 0:
            if const_expr(spec.bulk):
                cpasync.prefetch_descriptor(atom_k)
                cpasync.prefetch_descriptor(atom_v)
            arrivals = 1 if const_expr(spec.bulk) else WARPGROUP
            with cute.arch.elect_one():
                for full, empty, stages in (
                    (storage.full_k, storage.empty_k, spec.key_stages),
                    (storage.full_v, storage.empty_v, spec.stages),
                ):
                    for s in cutlass.range_constexpr(stages):
                        cute.arch.mbarrier_init(full.data_ptr() + s, arrivals)
                        cute.arch.mbarrier_init(empty.data_ptr() + s, 4 * spec.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What was launched before may still write what is read from here on; what comes after may
        # be launched as soon as every program runs, and waits itself.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        s_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        s_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        # Weights take the place of a latent's rotary channels, which have scored already.
        p_at = storage.k.data_ptr() if const_expr(spec.latent) else storage.p.data_ptr()
        s_p = cute.make_tensor(cute.recast_ptr(p_at, p_layout.inner, self.dtype), p_layout.outer)
        total = mItems.shape[0] * spec.kv_heads
        # Tiles that this program has gone through: both sides count them alike.
        done = Int32(0)
        if warp < 4 * spec.groups:
            if const_expr(spec.groups > 1):
                cute.arch.setmaxregister_increase(MANY_REGISTERS)
            for work in cutlass.range(block, total, programs, unroll=1):
                kv_head, item = work % spec.kv_heads, work // spec.kv_heads
                if mItems[item, 2] > 0:
                    start, count = self._tiles(mItems, item)
                    self._load_queries(mQ, mItems, item, kv_head, storage.q.data_ptr(), thread)
                    self._attend(
                        mSink, mOut, mLse, mPart, mPartLse, mItems, item, kv_head, window,
                        qk_scale, exp_scale, tiled_qk, tiled_pv, s_q, s_k, s_v, s_p, storage,
                        start, count, done,
                    )  # fmt: skip
                    done += count
        else:
            if const_expr(spec.groups > 1):
                cute.arch.setmaxregister_decrease(FEW_REGISTERS)
            for work in cutlass.range(block, total, programs, unroll=1):
                kv_head, item = work % spec.kv_heads, work // spec.kv_heads
                if mItems[item, 2] > 0:
                    start, count = self._tiles(mItems, item)
                    base, hi = mItems[item, 4], mItems[item, 6]
                    if const_expr(not spec.bulk):
                        self._load_rows(
                            mTable, base, kv_head, mK, mV, storage, start, hi, count, done
                        )
                    elif warp == 4 * spec.groups:
                        self._load_boxes(
                            mTable, base, kv_head, atom_k, tma_k, atom_v, tma_v, storage, start,
                            hi, count, done,
                        )  # fmt: skip
                    done += count

    @cute.jit
    def _tiles(self, mItems, item):
        """First key and number of an item's tiles; a tile starts where a box does."""
        start, hi = mItems[item, 5], mItems[item, 6]
        if const_expr(self.spec.bulk):
            start -= start % self.box
        return start, cute.ceil_div(cutlass.max(hi - start, 0), KEYS)

    @cute.jit
    def _load_queries(self, mQ, mItems, item, kv_head, s_q: cute.Pointer, thread):
        """TILE_M rows of queries, 16 bytes at a time; rows that are not there are zero."""
        spec = self.spec
        group = const_expr(spec.heads // spec.kv_heads)
        q_row, row, rows = mItems[item, 0], mItems[item, 1], mItems[item, 2]
        pieces = const_expr(spec.dim // 8)
        threads = const_expr(spec.groups * WARPGROUP)
        passes = const_expr(cute.ceil_div(spec.tile_m * pieces, threads))
        # All are on their way before the first is stored: one round trip, not one a pass.
        held = cute.make_rmem_tensor((8, passes), self.dtype)
        for i in cutlass.range_constexpr(passes):
            piece = cutlass.min(i * threads + thread, spec.tile_m * pieces - 1)
            flat = cutlass.min(row + piece // pieces, rows - 1)
            query, head = flat // group, kv_head * group + flat % group
            source = self._piece(
                mQ,
                Int64(q_row + query) * mQ.stride[0]
                + Int64(head) * mQ.stride[1]
                + Int64(piece % pieces * 8),
            )
            cute.autovec_copy(source, held[None, i])
        for i in cutlass.range_constexpr(passes):
            piece = i * threads + thread
            if piece < spec.tile_m * pieces:
                n, c = piece // pieces, piece % pieces
                offset = (c // 8) * (spec.tile_m * BLOCK) + n * BLOCK + ((c % 8) ^ (n % 8)) * 8
                target = cute.make_tensor((s_q + offset).align(16), cute.make_layout(8))
                for e in cutlass.range_constexpr(8):
                    held[e, i] = held[e, i] if row + n < rows else self.dtype(0.0)
                cute.autovec_copy(held[None, i], target)

    @cute.jit
    def _piece(self, tensor: cute.Tensor, offset: Int64):
        """16 bytes of global memory."""
        pointer = cute.make_ptr(
            self.dtype, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        return cute.make_tensor(pointer, cute.make_layout(8))

    @cute.jit
    def _load_boxes(
        self, mTable, base, kv_head, atom_k, tma_k, atom_v, tma_v, storage, start, hi, count, done
    ):
        """One warp: each lane looks one box's page up, for 32 boxes at a time. The wide tiles of
        latents go first, as there are more of them."""
        spec = self.spec
        box = const_expr(self.box)
        boxes = const_expr(KEYS // box)
        keys = self._side(atom_k, tma_k, kv_head, storage.k, spec.key_dim, spec.key_stages)
        values = self._side(atom_v, tma_v, kv_head, storage.v, spec.dim_v, spec.stages)
        lane = cute.arch.lane_idx()
        page = Int32(0)
        for i in cutlass.range(count, unroll=1):
            first = i * boxes
            if first % 32 == 0:
                key = cutlass.min(start + (first + lane) * box, hi - 1)
                page = mTable[base, key // spec.page]
            n0 = start + i * KEYS
            live = cutlass.min(cute.ceil_div(hi - n0, box), boxes)
            at = (done + i, first, n0, live, page)
            if const_expr(spec.latent):
                self._load_side(
                    atom_v, values, storage.full_v, storage.empty_v, spec.dim_v, spec.stages, at
                )
            self._load_side(
                atom_k, keys, storage.full_k, storage.empty_k, spec.key_dim, spec.key_stages, at
            )
            if const_expr(not spec.latent):
                self._load_side(
                    atom_v, values, storage.full_v, storage.empty_v, spec.dim_v, spec.stages, at
                )

    @cute.jit
    def _side(self, atom, tma, kv_head, ring, dim: cutlass.Constexpr, stages: cutlass.Constexpr):
        """Where boxes of keys or values go, [.., boxes, stages], and come from, [.., P, N]."""
        layout = self._boxes_layout(dim, stages)
        tiles = ring.get_tensor(layout.outer, swizzle=layout.inner)
        pool = cute.local_tile(tma[None, None, kv_head, None], (self.box, dim), (None, 0, None))
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(tiles, 0, 2),
            cute.group_modes(pool, 0, 2),
        )

    @cute.jit
    def _load_side(
        self, atom, side, full, empty, dim: cutlass.Constexpr, stages: cutlass.Constexpr, at
    ):
        """The live boxes of one tile, once its place is free."""
        box = const_expr(self.box)
        to, pool = side
        tile, first, n0, live, page = at
        stage = tile % stages
        cute.arch.mbarrier_wait(empty.data_ptr() + stage, 1 - tile // stages % 2)
        ready = full.data_ptr() + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, live * (box * dim * 2))
        for b in cutlass.range_constexpr(KEYS // box):
            if b < live:
                source = cute.arch.shuffle_sync(page, (first + b) % 32)
                within = ((n0 + b * box) % self.spec.page) // box
                cute.copy(atom, pool[None, within, source], to[None, b, stage], tma_bar_ptr=ready)

    @cute.jit
    def _load_rows(self, mTable, base, kv_head, mK, mV, storage, start, hi, count, done):
        """A warpgroup: 8 threads copy a row, each 16 bytes of every 64 channels. A tile is
        announced once the copies of `lag` later ones are under way."""
        spec = self.spec
        lag = const_expr(spec.key_stages - 1)
        passes = const_expr(KEYS * 8 // WARPGROUP)
        thread = cute.arch.thread_idx()[0] - spec.groups * WARPGROUP
        pages = cute.make_rmem_tensor((passes,), Int32)
        for j in cutlass.range_constexpr(passes):
            key = cutlass.min(start + thread // 8 + j * 16, hi - 1)
            pages[j] = mTable[base, cutlass.max(key, 0) // spec.page] if count > 0 else Int32(0)
        for i in cutlass.range(count, unroll=1):
            tile = done + i
            k_stage, v_stage = tile % spec.key_stages, tile % spec.stages
            n0 = start + i * KEYS
            cute.arch.mbarrier_wait(
                storage.empty_k.data_ptr() + k_stage, 1 - tile // spec.key_stages % 2
            )
            cute.arch.mbarrier_wait(
                storage.empty_v.data_ptr() + v_stage, 1 - tile // spec.stages % 2
            )
            for j in cutlass.range_constexpr(passes):
                row = thread // 8 + j * 16
                if n0 + row < hi:
                    within = (n0 + row) % spec.page
                    self._copy_row(
                        mK, pages[j], within, kv_head, spec.key_dim, storage.k.data_ptr(), k_stage,
                        row, thread % 8,
                    )  # fmt: skip
                    self._copy_row(
                        mV, pages[j], within, kv_head, spec.dim_v, storage.v.data_ptr(), v_stage,
                        row, thread % 8,
                    )  # fmt: skip
                key = cutlass.min(n0 + KEYS + row, hi - 1)
                pages[j] = mTable[base, key // spec.page]
            cute.arch.cp_async_commit_group()
            if i >= lag:
                cute.arch.cp_async_wait_group(lag)
                self._announce(storage, tile - lag)
        cute.arch.cp_async_wait_group(0)
        for i in cutlass.range(cutlass.max(count - lag, 0), count, unroll=1):
            self._announce(storage, done + i)

    @cute.jit
    def _announce(self, storage, tile):
        """This thread's copies of a tile have arrived."""
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(storage.full_k.data_ptr() + tile % self.spec.key_stages)
        cute.arch.mbarrier_arrive(storage.full_v.data_ptr() + tile % self.spec.stages)

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
        exp_scale, tiled_qk, tiled_pv, s_q, s_k, s_v, s_p, storage, start, count, done,
    ):  # fmt: skip
        """The computing warpgroups. A thread holds rows (2 lane columns + 0, 1) + 8 j of the tile
        (of its warpgroup's half, if there are two), for keys or channels 16 warp + lane // 4 + 0,
        8: a single warpgroup's columns are the same in both products, so that a row's maximum and
        factor are where they are needed; of two, each tells the other its rows' factors."""
        spec = self.spec
        n, groups = const_expr(spec.tile_m), const_expr(spec.groups)
        own = const_expr(n // groups)
        group = const_expr(spec.heads // spec.kv_heads)
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        warp, lane = thread % WARPGROUP // 32, thread % 32
        q_row, row, rows = mItems[item, 0], mItems[item, 1], mItems[item, 2]
        q_pos, lo, hi, slot = mItems[item, 3], mItems[item, 5], mItems[item, 6], mItems[item, 7]
        s_warps = cute.make_tensor(
            storage.warps.data_ptr().align(16), cute.make_layout((4, n), stride=(1, 4))
        )
        s_rows = cute.make_tensor(storage.rows.data_ptr(), cute.make_layout(n))

        thr_qk = tiled_qk.get_slice(thread % WARPGROUP)
        thr_pv = tiled_pv.get_slice(thread % WARPGROUP)
        # What scores: K, and a latent's V before it.
        a_k = tiled_qk.make_fragment_A(thr_qk.partition_A(s_k))
        a_l = tiled_qk.make_fragment_A(thr_qk.partition_A(s_v))
        s_q_own = cute.local_tile(s_q, (own, spec.dim), (wg, 0, None))
        b_q = tiled_qk.make_fragment_B(thr_qk.partition_B(s_q_own))
        # [dim_v, keys, stages]
        s_vt = cute.make_tensor(
            s_v.iterator,
            cute.make_layout(
                ((BLOCK, spec.dim_v // BLOCK), (8, KEYS // 8), spec.stages),
                stride=(
                    (1, KEYS * BLOCK),
                    (BLOCK, 8 * BLOCK),
                    KEYS * spec.dim_v,
                ),
            ),
        )
        channels = const_expr(spec.dim_v // groups)
        s_vt_own = cute.local_tile(s_vt, (channels, KEYS), (wg, 0, None))
        a_v = tiled_pv.make_fragment_A(thr_pv.partition_A(s_vt_own))
        b_p = tiled_pv.make_fragment_B(thr_pv.partition_B(s_p))
        scores = cute.make_rmem_tensor(tiled_qk.partition_shape_C((KEYS, own)), Float32)
        acc = cute.make_rmem_tensor(tiled_pv.partition_shape_C((channels, n)), Float32)
        acc.fill(0.0)
        weights = cute.make_rmem_tensor(scores.shape, self.dtype)
        s_pt = cute.make_tensor(s_p.iterator, cute.select(s_p.layout, [1, 0, 2]))
        to_p = thr_qk.partition_C(cute.local_tile(s_pt, (KEYS, own), (0, wg, None)))

        columns = const_expr(own // 4)
        top = cute.make_rmem_tensor((columns,), Float32)
        total = cute.make_rmem_tensor((columns,), Float32)
        most = cute.make_rmem_tensor((columns,), Float32)
        kept = cute.make_rmem_tensor((columns,), Float32)
        top.fill(-Float32.inf)
        total.fill(0.0)
        if const_expr(spec.sink):  # noqa: SIM102  this one is decided when compiling
            if mItems[item, 8] > 0:
                for c in cutlass.range_constexpr(columns):
                    flat = row + self._column(c, lane, wg * own)
                    if flat < rows:
                        top[c] = mSink[kv_head * group + flat % group] * LOG2_E
                        total[c] = Float32(1.0) if thread % WARPGROUP < 4 else Float32(0.0)
        # Tiles within are seen whole by every row.
        seen_lo, seen_hi = lo, hi
        if const_expr(not spec.single):
            seen_hi = cutlass.min(hi, q_pos + row // group + 1)
            if const_expr(spec.window):
                last_pos = q_pos + (cutlass.min(row + n, rows) - 1) // group
                seen_lo = cutlass.max(lo, last_pos - window)

        cute.arch.fence_view_async_shared()
        self._meet()
        for i in cutlass.range(count, unroll=1):
            tile, n0 = done + i, start + i * KEYS
            k_stage, v_stage = tile % spec.key_stages, tile % spec.stages
            full_k, full_v = storage.full_k.data_ptr(), storage.full_v.data_ptr()
            shared = const_expr((spec.dim - spec.key_dim) // 16)
            if const_expr(spec.latent):
                cute.arch.mbarrier_wait(full_v + v_stage, tile // spec.stages % 2)
            else:
                cute.arch.mbarrier_wait(full_k + k_stage, tile // spec.key_stages % 2)
            warpgroup.fence()
            for kk in cutlass.range_constexpr(shared):
                tiled_qk.set(warpgroup.Field.ACCUMULATE, kk > 0)
                cute.gemm(
                    tiled_qk, scores, a_l[None, None, kk, v_stage], b_q[None, None, kk, 0], scores
                )
            if const_expr(spec.latent):
                cute.arch.mbarrier_wait(full_k + k_stage, tile // spec.key_stages % 2)
            for kk in cutlass.range_constexpr(spec.key_dim // 16):
                tiled_qk.set(warpgroup.Field.ACCUMULATE, shared + kk > 0)
                cute.gemm(
                    tiled_qk,
                    scores,
                    a_k[None, None, kk, k_stage],
                    b_q[None, None, shared + kk, 0],
                    scores,
                )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if const_expr(not spec.latent):
                self._release(storage.empty_k.data_ptr() + k_stage, lane)
            if const_expr(spec.softcap):
                for e in cutlass.range_constexpr(cute.size(scores)):
                    x = scores[e] * qk_scale
                    x = Float32(-30.0) if x < -30.0 else x  # a NaN stays one
                    scores[e] = 2.0 / (1.0 + cute.math.exp2(x * (-2.0 * LOG2_E))) - 1.0
            if n0 < seen_lo or n0 + KEYS > seen_hi:
                for c in cutlass.range_constexpr(columns):
                    first, end = lo, hi
                    if const_expr(not spec.single):
                        pos = q_pos + (row + self._column(c, lane, wg * own)) // group
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
                    s_warps[warp, self._column(c, lane, wg * own)] = most[c]
            self._meet()
            four = cute.make_rmem_tensor((4,), Float32)
            for c in cutlass.range_constexpr(columns):
                cute.autovec_copy(s_warps[None, self._column(c, lane, wg * own)], four)
                x = cute.arch.fmax(
                    cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3])
                )
                new = cute.arch.fmax(top[c], x * exp_scale)
                # A row that has seen no key yet: -inf minus -inf would be nan.
                shift = Float32(0.0) if new == -Float32.inf else new
                kept[c] = cute.math.exp2(top[c] - shift, fastmath=True)
                top[c] = new
                for h in cutlass.range_constexpr(2):
                    e = const_expr(4 * (c // 2) + 2 * h + c % 2)
                    scores[e] = cute.math.exp2(scores[e] * exp_scale - shift, fastmath=True)
                e = const_expr(4 * (c // 2) + c % 2)
                total[c] = total[c] * kept[c] + (scores[e] + scores[e + 2])
            for e in cutlass.range_constexpr(cute.size(scores)):
                weights[e] = self.dtype(scores[e])
            cute.autovec_copy(
                weights, to_p[None, None, None, k_stage if const_expr(spec.latent) else 0]
            )
            if const_expr(groups > 1):
                if warp == 0 and lane < 4:  # noqa: SIM102
                    for c in cutlass.range_constexpr(columns):
                        s_rows[self._column(c, lane, wg * own)] = kept[c]
            else:
                self._scale(acc, kept)
            if const_expr(not spec.latent):
                cute.arch.mbarrier_wait(full_v + v_stage, tile // spec.stages % 2)
            if n0 < lo or n0 + KEYS > hi:
                self._clear_rows(storage, v_stage, n0, lo, hi, thread)
            cute.arch.fence_view_async_shared()
            self._meet()
            if const_expr(groups > 1):
                factors = cute.make_rmem_tensor((n // 4,), Float32)
                for c in cutlass.range_constexpr(n // 4):
                    factors[c] = s_rows[self._column(c, lane, 0)]
                self._scale(acc, factors)
            warpgroup.fence()
            tiled_pv.set(warpgroup.Field.ACCUMULATE, True)
            for kk in cutlass.range_constexpr(KEYS // 16):
                cute.gemm(
                    tiled_pv,
                    acc,
                    a_v[None, None, kk, v_stage],
                    b_p[None, None, kk, k_stage if const_expr(spec.latent) else 0],
                    acc,
                )
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self._release(storage.empty_v.data_ptr() + v_stage, lane)
            if const_expr(spec.latent):
                self._release(storage.empty_k.data_ptr() + k_stage, lane)

        self._finish(
            mOut, mLse, mPart, mPartLse, acc, top, total, s_warps, s_rows, kv_head, q_row, row,
            rows, slot,
        )  # fmt: skip

    @cute.jit
    def _release(self, empty: cute.Pointer, lane):
        """This warp is done with a tile."""
        if lane == 0:
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def _meet(self):
        """All computing threads."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.spec.groups * WARPGROUP)

    @cute.jit
    def _scale(self, acc, factors):
        """Multiply the accumulator's rows by what is kept of them: nothing to do where no row of
        this thread has a new maximum, as is so for most tiles."""
        n = const_expr(self.spec.tile_m)
        least = factors[0]
        for c in cutlass.range_constexpr(1, n // 4):
            least = cutlass.min(least, factors[c])
        if least < 1.0:
            for b in cutlass.range_constexpr(self.spec.dim_v // self.spec.groups // BLOCK):
                for c in cutlass.range_constexpr(n // 4):
                    for h in cutlass.range_constexpr(2):
                        e = const_expr(b * (n // 2) + 4 * (c // 2) + 2 * h + c % 2)
                        acc[e] = acc[e] * factors[c]

    @cute.jit
    def _finish(
        self, mOut, mLse, mPart, mPartLse, acc, top, total, s_warps, s_rows, kv_head, q_row, row,
        rows, slot,
    ):  # fmt: skip
        """Join the threads' denominators and write the rows: final, or fp32 with a base-2 lse."""
        spec = self.spec
        n, groups = const_expr(spec.tile_m), const_expr(spec.groups)
        own = const_expr(n // groups)
        group = const_expr(spec.heads // spec.kv_heads)
        thread, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        warp, lane = thread % WARPGROUP // 32, thread % 32
        columns = const_expr(own // 4)
        for c in cutlass.range_constexpr(columns):
            x = total[c]
            for distance in cutlass.range_constexpr(3):
                x += cute.arch.shuffle_sync_bfly(x, offset=const_expr(4 << distance))
            total[c] = x
        # The last tile's maxima have been read by all.
        self._meet()
        if lane < 4:
            for c in cutlass.range_constexpr(columns):
                s_warps[warp, self._column(c, lane, wg * own)] = total[c]
        self._meet()
        for c in cutlass.range_constexpr(columns):
            at = self._column(c, lane, wg * own)
            x = (s_warps[0, at] + s_warps[1, at]) + (s_warps[2, at] + s_warps[3, at])
            total[c] = Float32(0.0) if x == 0.0 else 1.0 / x
            log = top[c] + cute.math.log2(Float32(1.0) if x == 0.0 else x)
            flat = row + at
            if warp == 0 and lane < 4:
                if slot >= 0:
                    mPartLse[(Int64(slot) * spec.kv_heads + kv_head) * n + at] = log
                elif flat < rows:
                    mLse[q_row + flat // group, kv_head * group + flat % group] = log * LN_2
                if const_expr(groups > 1):
                    s_rows[at] = total[c]
        if const_expr(groups > 1):
            self._meet()
        for c in cutlass.range_constexpr(n // 4):
            at = self._column(c, lane, 0)
            scale = total[c] if const_expr(groups == 1) else s_rows[at]
            flat = row + at
            channel = wg * (spec.dim_v // groups) + warp * 16 + lane // 4
            if slot < 0:
                if flat < rows:
                    query, head = q_row + flat // group, kv_head * group + flat % group
                    cell = Int64(query) * (spec.heads * spec.dim_v) + head * spec.dim_v
                    self._write(mOut.iterator + (cell + channel), acc, c, scale)
            else:
                cell = ((Int64(slot) * spec.kv_heads + kv_head) * n + at) * spec.dim_v
                self._write(mPart.iterator + (cell + channel), acc, c, scale)
        if const_expr(groups > 1):
            self._meet()  # before the next item's factors

    @cute.jit
    def _write(self, start: cute.Pointer, acc, c: cutlass.Constexpr[int], scale):
        """The thread's channels of one row, times `scale`."""
        blocks = const_expr(self.spec.dim_v // self.spec.groups // BLOCK)
        n = const_expr(self.spec.tile_m)
        target = cute.make_tensor(start, cute.make_layout(BLOCK * blocks))
        for b in cutlass.range_constexpr(blocks):
            for h in cutlass.range_constexpr(2):
                e = const_expr(b * (n // 2) + 4 * (c // 2) + 2 * h + c % 2)
                target[b * BLOCK + 8 * h] = target.element_type(acc[e] * scale)

    @cute.jit
    def _clear_rows(self, storage, stage, n0, lo, hi, thread):
        """Zero the rows of V whose keys lie outside [lo, hi), 16 bytes a thread and pass."""
        spec = self.spec
        start = storage.v.data_ptr()
        step = const_expr(spec.groups * WARPGROUP // 8)
        for j in cutlass.range_constexpr(KEYS // step):
            row = thread // 8 + j * step
            if n0 + row < lo or n0 + row >= hi:
                for c in cutlass.range_constexpr(spec.dim_v // BLOCK):
                    at = stage * (KEYS * spec.dim_v) + c * (KEYS * BLOCK) + row * BLOCK
                    at += thread % 8 * 8
                    cute.make_tensor((start + at).align(16), cute.make_layout(8)).fill(
                        self.dtype(0.0)
                    )

    def _column(self, c: int, lane, first):
        """Row of the tile that a thread's column c is, its columns starting at row `first`."""
        return first + 8 * (c // 2) + 2 * (lane % 4) + c % 2
