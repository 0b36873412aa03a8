//! Packed groups into vector registers: one [`Source`] per quantised type, for any register. The layout of planes is in
//! [`super::form`].

use super::form::{LEVELS, PANEL};
use super::vector::{Group, Vector};
use super::wide::{Panels, RUNS, WideGroup};

/// In place of a number that is added to codes: the type's own offset, or 0 where that is 128.
pub(super) const OWN: u8 = u8::MAX;

/// A quantised type.
pub(super) trait Source {
    /// Bytes of a packed block.
    const BLOCK_BYTES: usize;
    /// Groups of 32 in a block.
    const GROUPS: usize;
    /// Scales of a group.
    const HALVES: usize;
    const HAS_MIN: bool;
    /// What is added to codes where they are unsigned; 128 if they need all eight bits.
    const OFFSET: u8;

    /// Rows `part * V::ROWS` on of a group.
    ///
    /// # Safety
    /// A whole packed block at `block`; `group` below [`GROUPS`](Self::GROUPS); the caller has the vector's instructions.
    unsafe fn load<V: Vector>(block: *const u8, group: usize, part: usize) -> Group<V>;

    /// Products of a term's runs, by the type's offset: the functions of [`Vector`] of these names.
    ///
    /// # Safety
    /// As there.
    unsafe fn begin<V: Vector>(offset: *const i32) -> V;
    /// # Safety
    /// As there.
    unsafe fn dot<V: Vector, const COUNT: usize>(sum: V, codes: [V; COUNT], x: *const i32) -> V;
    /// # Safety
    /// As there.
    unsafe fn open<V: Vector>(sum: V) -> V;
    /// # Safety
    /// As there.
    unsafe fn step<V: Vector>(part: V, codes: V, x: *const i32) -> V;
    /// # Safety
    /// As there.
    unsafe fn close<V: Vector>(sum: V, part: V) -> V;
    fn together<V: Vector>() -> usize;
    /// Codes plus `ZERO` (or [`OWN`]) in place of the type's own offset.
    ///
    /// # Safety
    /// The caller has the vector's instructions.
    unsafe fn with_zero_at<V: Vector, const ZERO: u8>(codes: V) -> V;
}

/// Unpacks whole packed blocks, codes plus `ZERO` (or [`OWN`]).
///
/// # Safety
/// The caller has the vector's instructions.
#[inline(always)]
pub(super) unsafe fn unpack<V: Vector, S: Source, const ZERO: u8>(packed: &[u8], wide: &mut [WideGroup]) {
    let blocks = packed.chunks_exact(S::BLOCK_BYTES).zip(wide.chunks_exact_mut(S::GROUPS));
    for (block, wide) in blocks {
        for (i, wide) in wide.iter_mut().enumerate() {
            for part in 0..PANEL / V::ROWS {
                let row = part * V::ROWS;
                // SAFETY: a whole block; instructions by the caller's promise.
                unsafe {
                    let group = S::load::<V>(block.as_ptr(), i, part);
                    for (to, codes) in wide.codes.iter_mut().zip(group.codes) {
                        S::with_zero_at::<V, ZERO>(codes).store(to.as_mut_ptr().add(row).cast());
                    }
                    for half in 0..S::HALVES {
                        V::store_float(group.scale[half], wide.scale[half].as_mut_ptr().add(row));
                        V::store_float(group.min[half], wide.min[half].as_mut_ptr().add(row));
                    }
                }
            }
        }
    }
}

/// Consecutive panels times one row, straight from the packed form, asking for memory `AHEAD` bytes ahead if that isn't 0.
///
/// # Safety
/// The caller has the vector's instructions. The first `TERMS` of `words` are tiles of one row over a panel's inputs.
#[inline(always)]
pub(super) unsafe fn gemv<V: Vector, S: Source, const SUBS: usize, const TERMS: usize, const AHEAD: usize>(
    panels: Panels<'_>,
    words: [&[u32]; 2],
    acc: &mut [f32],
) {
    for (panel, acc) in panels.bytes.chunks_exact(panels.panel_bytes).zip(acc.chunks_mut(panels.stride)) {
        let Some(acc) = acc.first_chunk_mut() else { return };
        // SAFETY: the caller's promise.
        unsafe { one_panel::<V, S, SUBS, TERMS, AHEAD>(panel, words, acc) };
    }
}

/// # Safety
/// As [`gemv`].
#[inline(always)]
unsafe fn one_panel<V: Vector, S: Source, const SUBS: usize, const TERMS: usize, const AHEAD: usize>(
    panel: &[u8],
    words: [&[u32]; 2],
    acc: &mut [f32; PANEL],
) {
    let sub_words = RUNS / SUBS + 3;
    let blocks = panel.len() / S::BLOCK_BYTES;
    assert!(words.iter().take(TERMS).all(|words| words.len() >= blocks * S::GROUPS * SUBS * sub_words));
    let mut block = panel.as_ptr();
    let mut at = words.map(|words| words.as_ptr().cast::<i32>());
    // SAFETY: lengths were checked; instructions by the caller's promise.
    unsafe {
        let mut y = [[V::splat(0.0); 4]; TERMS];
        for _ in 0..blocks {
            for group in 0..S::GROUPS {
                if AHEAD > 0 {
                    let ahead = block.wrapping_add(AHEAD + group * (S::BLOCK_BYTES / S::GROUPS));
                    for line in 0..(S::BLOCK_BYTES / S::GROUPS).div_ceil(64) {
                        V::prefetch(ahead.wrapping_add(64 * line));
                    }
                }
                for part in 0..PANEL / V::ROWS {
                    let weights = S::load::<V>(block, group, part);
                    for (y, at) in y.iter_mut().zip(at) {
                        for sub in 0..SUBS {
                            y[part] = add_products::<V, S, SUBS>(y[part], &weights, sub, at.add(sub * sub_words));
                        }
                    }
                }
                for at in at.iter_mut().take(TERMS) {
                    *at = at.add(SUBS * sub_words);
                }
            }
            block = block.add(S::BLOCK_BYTES);
        }
        let (first, second) = (y[0], y[TERMS - 1]);
        for (part, (first, second)) in first.into_iter().zip(second).enumerate().take(PANEL / V::ROWS) {
            let sum = if TERMS == 2 { V::add(first, second) } else { first };
            V::store_float(sum, acc.as_mut_ptr().add(part * V::ROWS));
        }
    }
}

/// `y` plus the products of a subgroup with its words at `x`.
#[inline(always)]
unsafe fn add_products<V: Vector, S: Source, const SUBS: usize>(
    y: V::Float,
    weights: &Group<V>,
    sub: usize,
    x: *const i32,
) -> V::Float {
    let half = if S::HALVES == 2 { sub } else { 0 };
    let codes = weights.codes;
    // SAFETY: the words of a subgroup; instructions by the caller's promise.
    unsafe {
        let meta = x.add(RUNS / SUBS);
        let begin = S::begin::<V>(meta.add(2));
        let sum = match (SUBS, sub) {
            (1, _) => S::dot(begin, codes, x),
            (_, 0) => S::dot(begin, [codes[0], codes[1], codes[2], codes[3]], x),
            _ => S::dot(begin, [codes[4], codes[5], codes[6], codes[7]], x),
        };
        let scale = V::mul(weights.scale[half], V::splat(*meta.cast::<f32>()));
        let y = V::fma(scale, sum.to_float(), y);
        if S::HAS_MIN { V::fma(weights.min[half], V::splat(*meta.add(1).cast::<f32>()), y) } else { y }
    }
}

/// Where a block's fields and planes are, for some of its rows.
struct Rows {
    block: *const u8,
    first: usize,
}

impl Rows {
    /// An f16 field: byte offset of its sixteen rows.
    #[inline(always)]
    unsafe fn half<V: Vector>(&self, at: usize) -> V::Float {
        // SAFETY: within the block by the caller's promise, here and below.
        unsafe { V::half(self.block.add(at + 2 * self.first)) }
    }

    /// A byte field.
    #[inline(always)]
    unsafe fn bytes<V: Vector>(&self, at: usize) -> V {
        // SAFETY: as above.
        unsafe { V::bytes(self.block.add(at + self.first)) }
    }

    /// A vector of a plane. Vectors are loaded in the order in which they are asked for, which should be that of addresses.
    #[inline(always)]
    unsafe fn codes<V: Vector>(&self, at: usize) -> V {
        // SAFETY: as above.
        let codes = unsafe { V::load(self.block.add(at + 4 * self.first)) };
        keep_order();
        codes
    }

    #[inline(always)]
    unsafe fn nibbles<V: Vector>(&self, at: usize) -> [V; RUNS] {
        // SAFETY: as above.
        unsafe {
            let mask = V::splat8(15);
            let mut codes = [mask; RUNS];
            for i in 0..4 {
                let v = self.codes::<V>(at + 64 * i);
                codes[i] = v.and(mask);
                codes[i + 4] = v.down16::<4>().and(mask);
            }
            codes
        }
    }
}

/// No access to memory is moved across by the compiler. Where a group's lines are not read in the order of addresses, processors take
/// what is a stream for something else, and ask for less of it ahead: a Zen 4 then reads half of what memory gives.
#[inline(always)]
fn keep_order() {
    // SAFETY: no instructions.
    unsafe { std::arch::asm!("", options(nostack, preserves_flags)) };
}

/// Bits from `$from` on moved to `$to`, masked.
macro_rules! field {
    ($v:expr, $mask:expr, $from:literal, $to:literal) => {
        if $to >= $from {
            $v.up16::<{ if $to >= $from { $to - $from } else { 0 } }>().and($mask)
        } else {
            $v.down16::<{ if $from > $to { $from - $to } else { 0 } }>().and($mask)
        }
    };
}

/// A two-bit plane (128 bytes), each field at bit `$to`.
macro_rules! two_bits {
    ($V:ident, $rows:ident, $at:expr, $to:literal) => {{
        let mask = $V::splat8(3 << $to);
        let (a, b) = ($rows.codes::<$V>($at), $rows.codes::<$V>($at + 64));
        [
            field!(a, mask, 0, $to),
            field!(a, mask, 2, $to),
            field!(a, mask, 4, $to),
            field!(a, mask, 6, $to),
            field!(b, mask, 0, $to),
            field!(b, mask, 2, $to),
            field!(b, mask, 4, $to),
            field!(b, mask, 6, $to),
        ]
    }};
}

/// A one-bit plane (64 bytes), each bit at bit `$to`.
macro_rules! one_bit {
    ($V:ident, $rows:ident, $at:expr, $to:literal) => {{
        let mask = $V::splat8(1 << $to);
        let v = $rows.codes::<$V>($at);
        [
            field!(v, mask, 0, $to),
            field!(v, mask, 1, $to),
            field!(v, mask, 2, $to),
            field!(v, mask, 3, $to),
            field!(v, mask, 4, $to),
            field!(v, mask, 5, $to),
            field!(v, mask, 6, $to),
            field!(v, mask, 7, $to),
        ]
    }};
}

/// Low and high bits together.
#[inline(always)]
unsafe fn join<V: Vector>(low: [V; RUNS], high: [V; RUNS]) -> [V; RUNS] {
    let mut codes = low;
    for i in 0..RUNS {
        // SAFETY: the caller has the instructions, here and below.
        codes[i] = unsafe { low[i].or(high[i]) };
    }
    codes
}

#[inline(always)]
unsafe fn levels<V: Vector>(mut codes: [V; RUNS]) -> [V; RUNS] {
    const TABLE: [u8; 16] = {
        let mut table = [0; 16];
        let mut i = 0;
        while i < 16 {
            table[i] = LEVELS[i].cast_unsigned() ^ 0x80;
            i += 1;
        }
        table
    };
    for codes in &mut codes {
        // SAFETY: as above.
        *codes = unsafe { codes.lookup(&TABLE) };
    }
    codes
}

#[inline(always)]
unsafe fn single<V: Vector>(codes: [V; RUNS], scale: V::Float) -> Group<V> {
    // SAFETY: as above.
    let zero = unsafe { V::splat(0.0) };
    Group { codes, scale: [scale, zero], min: [zero, zero] }
}

#[inline(always)]
unsafe fn with_min<V: Vector>(codes: [V; RUNS], centre: f32, scale: V::Float, min: V::Float) -> Group<V> {
    // SAFETY: as above.
    unsafe {
        let zero = V::splat(0.0);
        Group { codes, scale: [scale, zero], min: [V::fma(V::splat(centre), scale, min), zero] }
    }
}

/// `count` bits down, masked.
#[inline(always)]
unsafe fn shifted<V: Vector>(v: V, count: usize, mask: i32) -> V {
    // SAFETY: as above.
    unsafe { v.down32(count).and(V::splat32(mask)) }
}

/// d times a six-bit scale whose zero is 32.
#[inline(always)]
unsafe fn minus_32<V: Vector>(d: V::Float, low: V, high: V) -> V::Float {
    // SAFETY: as above.
    unsafe { V::mul(d, low.or(high.up32::<4>()).add32(V::splat32(-32)).to_float()) }
}

/// Scale and minimum of Q4_K and Q5_K.
#[inline(always)]
unsafe fn six_bit_scales<V: Vector>(rows: &Rows, g: usize) -> (V::Float, V::Float) {
    // SAFETY: fields of the header.
    unsafe {
        let packed = |i: usize| 64 + 16 * i;
        let (scale, min) = if g < 4 {
            (shifted(rows.bytes::<V>(packed(g)), 0, 63), shifted(rows.bytes::<V>(packed(g + 4)), 0, 63))
        } else {
            let both = rows.bytes::<V>(packed(g + 4));
            let scale_high = shifted(rows.bytes::<V>(packed(g - 4)), 6, 3);
            let min_high = shifted(rows.bytes::<V>(packed(g)), 6, 3);
            (shifted(both, 0, 15).or(scale_high.up32::<4>()), shifted(both, 4, 15).or(min_high.up32::<4>()))
        };
        let min = V::mul(rows.half::<V>(32), min.to_float());
        (V::mul(rows.half::<V>(0), scale.to_float()), V::sub(V::splat(-0.0), min))
    }
}

/// Name, bytes of a file block, groups, scales of a group, minima, offset, and how a group is loaded.
macro_rules! source {
    ($name:ident, $bytes:literal, $groups:literal, $halves:literal, $min:literal, $offset:literal,
     |$V:ident, $rows:ident, $g:ident| $body:expr) => {
        pub(super) struct $name;
        impl Source for $name {
            const BLOCK_BYTES: usize = PANEL * $bytes;
            const GROUPS: usize = $groups;
            const HALVES: usize = $halves;
            const HAS_MIN: bool = $min;
            const OFFSET: u8 = $offset;
            #[inline(always)]
            unsafe fn load<$V: Vector>(block: *const u8, $g: usize, part: usize) -> Group<$V> {
                let _ = $g;
                let $rows = Rows { block, first: part * $V::ROWS };
                // SAFETY: a whole block and the instructions, by the caller's promise.
                unsafe { $body }
            }
            #[inline(always)]
            unsafe fn begin<V: Vector>(offset: *const i32) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::begin::<$offset>(offset) }
            }
            #[inline(always)]
            unsafe fn dot<V: Vector, const COUNT: usize>(sum: V, codes: [V; COUNT], x: *const i32) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::dot::<$offset, COUNT>(sum, codes, x) }
            }
            #[inline(always)]
            unsafe fn open<V: Vector>(sum: V) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::open::<$offset>(sum) }
            }
            #[inline(always)]
            unsafe fn step<V: Vector>(part: V, codes: V, x: *const i32) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::step::<$offset>(part, codes, x) }
            }
            #[inline(always)]
            unsafe fn close<V: Vector>(sum: V, part: V) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::close::<$offset>(sum, part) }
            }
            #[inline(always)]
            fn together<V: Vector>() -> usize {
                V::together::<$offset>()
            }
            #[inline(always)]
            unsafe fn with_zero_at<V: Vector, const ZERO: u8>(codes: V) -> V {
                let zero = match (ZERO, $offset) {
                    (OWN, 128) => 0,
                    (OWN, own) => own,
                    (zero, _) => zero,
                };
                if zero == $offset {
                    return codes;
                }
                // SAFETY: the caller's promise.
                unsafe { codes.add8(V::splat8(zero.wrapping_sub($offset))) }
            }
        }
    };
}

source!(Q4_0, 18, 1, 1, false, 8, |V, rows, g| single(rows.nibbles::<V>(32), rows.half::<V>(0)));
source!(Q4_1, 20, 1, 1, true, 8, |V, rows, g| {
    with_min(rows.nibbles::<V>(64), 8.0, rows.half::<V>(0), rows.half::<V>(32))
});
source!(Q5_0, 22, 1, 1, false, 16, |V, rows, g| {
    single(join(rows.nibbles::<V>(32), one_bit!(V, rows, 32 + 256, 4)), rows.half::<V>(0))
});
source!(Q5_1, 24, 1, 1, true, 16, |V, rows, g| {
    let codes = join(rows.nibbles::<V>(64), one_bit!(V, rows, 64 + 256, 4));
    with_min(codes, 16.0, rows.half::<V>(0), rows.half::<V>(32))
});
source!(Q8_0, 34, 1, 1, false, 128, |V, rows, g| {
    let mut codes = [V::splat32(0); RUNS];
    for (i, codes) in codes.iter_mut().enumerate() {
        *codes = rows.codes::<V>(32 + 64 * i);
    }
    single(codes, rows.half::<V>(0))
});
source!(Iq4Nl, 18, 1, 1, false, 128, |V, rows, g| single(levels(rows.nibbles::<V>(32)), rows.half::<V>(0)));
source!(Iq4Xs, 136, 8, 1, false, 128, |V, rows, g| {
    let low = shifted(rows.bytes::<V>(64 + 16 * (g / 2)), 4 * (g % 2), 15);
    let high = shifted(V::halves(rows.block.add(32 + 2 * rows.first)), 2 * g, 3);
    single(levels(rows.nibbles::<V>(128 + 256 * g)), minus_32(rows.half::<V>(0), low, high))
});
source!(Q4K, 144, 8, 1, true, 8, |V, rows, g| {
    let (scale, min) = six_bit_scales::<V>(&rows, g);
    with_min(rows.nibbles::<V>(256 + 256 * g), 8.0, scale, min)
});
source!(Q5K, 176, 8, 1, true, 16, |V, rows, g| {
    let (scale, min) = six_bit_scales::<V>(&rows, g);
    let at = 256 + 320 * g;
    with_min(join(rows.nibbles::<V>(at), one_bit!(V, rows, at + 256, 4)), 16.0, scale, min)
});
source!(Q6K, 210, 8, 2, false, 32, |V, rows, g| {
    let at = 288 + 384 * g;
    let codes = join(rows.nibbles::<V>(at), two_bits!(V, rows, at + 256, 4));
    let (d, zero) = (rows.half::<V>(0), V::splat(0.0));
    let mut scale = [zero; 2];
    for (i, scale) in scale.iter_mut().enumerate() {
        *scale = V::mul(d, V::signed_bytes(rows.block.add(32 + 16 * (2 * g + i) + rows.first)).to_float());
    }
    Group { codes, scale, min: [zero, zero] }
});
source!(Q2K, 84, 8, 2, true, 2, |V, rows, g| {
    let codes = two_bits!(V, rows, 320 + 128 * g, 0);
    let (d, dmin, zero) = (rows.half::<V>(0), rows.half::<V>(32), V::splat(0.0));
    let (mut scale, mut min) = ([zero; 2], [zero; 2]);
    for i in 0..2 {
        let packed = rows.bytes::<V>(64 + 16 * (2 * g + i));
        scale[i] = V::mul(d, shifted(packed, 0, 15).to_float());
        let product = V::mul(dmin, shifted(packed, 4, 15).to_float());
        min[i] = V::fma(V::splat(2.0), scale[i], V::sub(V::splat(-0.0), product));
    }
    Group { codes, scale, min }
});
source!(Q3K, 110, 8, 2, false, 4, |V, rows, g| {
    let at = 224 + 192 * g;
    let codes = join(two_bits!(V, rows, at, 0), one_bit!(V, rows, at + 128, 2));
    let (d, zero) = (rows.half::<V>(0), V::splat(0.0));
    let mut scale = [zero; 2];
    for (i, scale) in scale.iter_mut().enumerate() {
        let group = 2 * g + i;
        let low = shifted(rows.bytes::<V>(32 + 16 * (group % 8)), 4 * (group / 8), 15);
        let high = shifted(rows.bytes::<V>(32 + 16 * (8 + group % 4)), 2 * (group / 4), 3);
        *scale = minus_32::<V>(d, low, high);
    }
    Group { codes, scale, min: [zero, zero] }
});

/// Calls a macro with the [`Source`] of a type.
macro_rules! with_source {
    ($dtype:expr, $call:ident) => {
        match $dtype {
            DType::Q4_0 => $call!(Q4_0),
            DType::Q4_1 => $call!(Q4_1),
            DType::Q5_0 => $call!(Q5_0),
            DType::Q5_1 => $call!(Q5_1),
            DType::Q8_0 => $call!(Q8_0),
            DType::Q2_K => $call!(Q2K),
            DType::Q3_K => $call!(Q3K),
            DType::Q4_K => $call!(Q4K),
            DType::Q5_K => $call!(Q5K),
            DType::Q6_K => $call!(Q6K),
            DType::IQ4_NL => $call!(Iq4Nl),
            DType::IQ4_XS => $call!(Iq4Xs),
            _ => debug_assert!(false, "{:?} has no packed form", $dtype),
        }
    };
}
pub(super) use with_source;

/// The entry point `unpack` of an instruction set, by type.
macro_rules! unpack_entry {
    ($vector:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn unpack_source<S: $crate::kernels::gemm::sources::Source, const ZERO: u8>(
            packed: &[u8],
            wide: &mut [WideGroup],
        ) {
            // SAFETY: the instructions are enabled here.
            unsafe { $crate::kernels::gemm::sources::unpack::<$vector, S, ZERO>(packed, wide) }
        }

        /// Unpacks whole packed blocks of a type, codes plus `ZERO` (or [`OWN`](super::sources::OWN)).
        ///
        /// # Safety
        /// The processor has the instructions.
        pub(super) unsafe fn unpack<const ZERO: u8>(dtype: DType, packed: &[u8], wide: &mut [WideGroup]) {
            macro_rules! call {
                ($source:ident) => {
                    unpack_source::<$crate::kernels::gemm::sources::$source, ZERO>(packed, wide)
                };
            }
            // SAFETY: the caller's promise.
            unsafe { $crate::kernels::gemm::sources::with_source!(dtype, call) }
        }
    };
}
pub(super) use unpack_entry;

/// The entry point `gemv`.
macro_rules! gemv_entry {
    ($vector:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn gemv_source<
            S: $crate::kernels::gemm::sources::Source,
            const SUBS: usize,
            const TERMS: usize,
            const AHEAD: usize,
        >(
            panels: $crate::kernels::gemm::wide::Panels<'_>,
            words: [&[u32]; 2],
            acc: &mut [f32],
        ) {
            // SAFETY: the instructions are enabled here; `words` by the caller's promise.
            unsafe { $crate::kernels::gemm::sources::gemv::<$vector, S, SUBS, TERMS, AHEAD>(panels, words, acc) }
        }

        /// Panels of a type times one row, asking for weights `AHEAD` bytes ahead of their use.
        ///
        /// # Safety
        /// The processor has the instructions; `words` are tiles of one row over a panel's inputs, the second empty if the
        /// row has no second term.
        pub(super) unsafe fn gemv<const AHEAD: usize>(
            dtype: DType,
            format: Format,
            panels: $crate::kernels::gemm::wide::Panels<'_>,
            words: [&[u32]; 2],
            acc: &mut [f32],
        ) {
            macro_rules! call {
                ($source:ident) => {{
                    type S = $crate::kernels::gemm::sources::$source;
                    let one_scale = <S as $crate::kernels::gemm::sources::Source>::HALVES == 1 && format.subs == 1;
                    match (one_scale, words[1].is_empty()) {
                        (true, true) => gemv_source::<S, 1, 1, AHEAD>(panels, words, acc),
                        (true, false) => gemv_source::<S, 1, 2, AHEAD>(panels, words, acc),
                        (false, true) => gemv_source::<S, 2, 1, AHEAD>(panels, words, acc),
                        (false, false) => gemv_source::<S, 2, 2, AHEAD>(panels, words, acc),
                    }
                }};
            }
            // SAFETY: the caller's promise.
            unsafe { $crate::kernels::gemm::sources::with_source!(dtype, call) }
        }
    };
}
pub(super) use gemv_entry;
