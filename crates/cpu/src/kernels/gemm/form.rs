//! The packed form of block-quantised weights: the file's own bits, sixteen output rows side by side.
//!
//! A panel is 16 rows over all inputs. It is a sequence of packed blocks, one for each block of the file's type (32 or
//! 256 inputs), each as long as the sixteen file blocks it comes from:
//!
//! ```text
//! header   each f16 field of the file block: [16 rows] f16; then each byte field: [16 rows] u8
//! codes    for each group of 32 inputs, planes of bits; a plane is made of 64-byte vectors [16 rows][4 inputs]
//! ```
//!
//! A *run* is 4 consecutive inputs; a group has 8. Run `j` lies in these bits of each byte of the planes:
//! - four-bit plane, 4 vectors: vector `j % 4`, low nibble for `j < 4`, else high;
//! - two-bit plane, 2 vectors: vector `j / 4`, bits `2 (j % 4)..`;
//! - one-bit plane, 1 vector: bit `j`;
//! - byte plane, 8 vectors: vector `j`.
//!
//! Codes of 3, 5, 6 bits are a plane of low bits followed by a plane of high bits. So a vector holds what one integer dot
//! product wants (4 inputs of 16 rows), and unpacking is shifts and masks. Rows beyond the last are zero bytes.

use qwen_formats::{DType, blocks};

use super::wide::{GROUP, RUNS, WideGroup};
use crate::kernels::math::f16_to_f32;

/// Rows of a panel.
pub(super) const PANEL: usize = 16;

/// Levels of the non-linear four-bit types.
pub(super) const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// How a quantised type is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) dtype: DType,
    /// Byte offsets of the f16 fields in a file block.
    pub(super) half_fields: &'static [usize],
    /// First byte and number of the byte fields in a file block.
    byte_fields: (usize, usize),
    /// Bits of a code.
    pub(super) bits: usize,
    /// Middle of the codes as stored: what is subtracted before multiplying. With a minimum the difference is put back through
    /// it, which keeps the codes small and so the effect of rounded activations.
    pub(super) centre: i8,
    /// Values are `scale * code + min`.
    pub(super) has_min: bool,
    /// Scales in a group of 32: 1, or 2 for types with groups of 16.
    pub(super) halves: usize,
}

impl Form {
    /// The form of a type, if it has one.
    pub(super) const fn of(dtype: DType) -> Option<Self> {
        let (half_fields, byte_fields, bits, centre, has_min, halves): (&'static [usize], _, _, _, _, _) = match dtype {
            DType::Q4_0 => (&[0], (0, 0), 4, 8, false, 1),
            DType::Q4_1 => (&[0, 2], (0, 0), 4, 8, true, 1),
            DType::Q5_0 => (&[0], (0, 0), 5, 16, false, 1),
            DType::Q5_1 => (&[0, 2], (0, 0), 5, 16, true, 1),
            // The stored byte is the code with its top bit turned: 128 more, unsigned.
            DType::Q8_0 => (&[0], (0, 0), 8, 0, false, 1),
            DType::Q2_K => (&[80, 82], (0, 16), 2, 2, true, 2),
            DType::Q3_K => (&[108], (96, 12), 3, 4, false, 2),
            DType::Q4_K => (&[0, 2], (4, 12), 4, 8, true, 1),
            DType::Q5_K => (&[0, 2], (4, 12), 5, 16, true, 1),
            DType::Q6_K => (&[208], (192, 16), 6, 32, false, 2),
            DType::IQ4_NL => (&[0], (0, 0), 4, 0, false, 1),
            DType::IQ4_XS => (&[0, 2], (4, 4), 4, 0, false, 1),
            _ => return None,
        };
        Some(Self { dtype, half_fields, byte_fields, bits, centre, has_min, halves })
    }

    /// Inputs of a block.
    pub(super) const fn block_len(&self) -> usize {
        self.dtype.block_len()
    }

    /// Groups of 32 inputs in a block.
    pub(super) const fn groups(&self) -> usize {
        self.dtype.block_len() / GROUP
    }

    /// Bytes of a packed block.
    pub(super) const fn packed_block_bytes(&self) -> usize {
        PANEL * self.dtype.block_bytes()
    }

    /// Bytes before the codes of a packed block.
    const fn header_bytes(&self) -> usize {
        PANEL * (2 * self.half_fields.len() + self.byte_fields.1)
    }

    /// Bytes of the codes of a packed group.
    const fn group_bytes(&self) -> usize {
        PANEL * GROUP / 8 * self.bits
    }

    /// Packs up to sixteen rows, `row_bytes` apart in `source`, into one panel. `panel` is whole packed blocks.
    pub(super) fn pack_panel(&self, source: &[u8], row_bytes: usize, panel: &mut [u8]) {
        panel.fill(0);
        let block_bytes = self.dtype.block_bytes();
        for (row, bytes) in source.chunks_exact(row_bytes).take(PANEL).enumerate() {
            let packed = panel.chunks_exact_mut(self.packed_block_bytes());
            for (block, packed) in bytes.chunks_exact(block_bytes).zip(packed) {
                let (header, codes) = packed.split_at_mut(self.header_bytes());
                self.pack_header(block, row, header);
                self.pack_codes(block, row, codes);
            }
        }
    }

    fn pack_header(&self, block: &[u8], row: usize, header: &mut [u8]) {
        for (i, &at) in self.half_fields.iter().enumerate() {
            let to = 2 * (PANEL * i + row);
            header[to..to + 2].copy_from_slice(&block[at..at + 2]);
        }
        let bytes = &mut header[2 * PANEL * self.half_fields.len()..];
        let (first, count) = self.byte_fields;
        for (i, &byte) in block[first..first + count].iter().enumerate() {
            bytes[PANEL * i + row] = byte;
        }
    }

    fn pack_codes(&self, block: &[u8], row: usize, packed: &mut [u8]) {
        match self.dtype {
            // The file's nibbles are in the order of the plane already: byte i has inputs i and i + 16.
            DType::Q4_0 | DType::Q4_1 | DType::IQ4_NL => {
                let runs = block[block.len() - 16..].as_chunks::<4>().0;
                for (vector, run) in packed.as_chunks_mut::<{ 4 * PANEL }>().0.iter_mut().zip(runs) {
                    vector.as_chunks_mut::<4>().0[row] = *run;
                }
            }
            DType::Q8_0 => {
                let runs = block[2..].as_chunks::<4>().0;
                for (vector, run) in packed.as_chunks_mut::<{ 4 * PANEL }>().0.iter_mut().zip(runs) {
                    vector.as_chunks_mut::<4>().0[row] = run.map(|byte| byte ^ 0x80);
                }
            }
            _ => self.pack_planes(block, row, packed),
        }
    }

    fn pack_planes(&self, block: &[u8], row: usize, packed: &mut [u8]) {
        let mut codes = [0; blocks::MAX_BLOCK_LEN];
        let (mut scales, mut mins) = ([0.0; blocks::MAX_GROUPS], [0.0; blocks::MAX_GROUPS]);
        let count = self.block_len() / self.dtype.group_len();
        let codes = &mut codes[..self.block_len()];
        let split = blocks::decode_groups(self.dtype, block, codes, &mut scales[..count], &mut mins[..count]);
        debug_assert!(split.is_ok(), "{:?}", self.dtype);
        for (codes, packed) in codes.as_chunks::<GROUP>().0.iter().zip(packed.chunks_exact_mut(self.group_bytes())) {
            let stored = codes.map(|code| match self.dtype {
                DType::IQ4_XS => LEVELS.iter().position(|&level| level == code).unwrap_or(0) as u8,
                _ if self.has_min => code.cast_unsigned(),
                _ => code.wrapping_add(self.centre).cast_unsigned(),
            });
            self.pack_group(&stored, row, packed.as_chunks_mut().0);
        }
    }

    /// The stored codes of a row's group, a run of four at a time.
    fn pack_group(&self, stored: &[u8; GROUP], row: usize, vectors: &mut [[u8; 4 * PANEL]]) {
        let mut first = 0;
        for (shift, width) in planes(self.bits) {
            let mask = u32::from(mask(width)) * 0x0101_0101;
            for (run, codes) in stored.as_chunks::<4>().0.iter().enumerate() {
                let (vector, at) = place(width, run);
                let bits = (u32::from_le_bytes(*codes) >> shift & mask) << at;
                let to = &mut vectors[first + vector].as_chunks_mut::<4>().0[row];
                *to = (u32::from_le_bytes(*to) | bits).to_le_bytes();
            }
            first += width;
        }
    }

    /// Unpacks whole packed blocks: the reference, and with more instructions the AVX2 variant.
    #[inline(always)]
    pub(super) fn unpack(&self, packed: &[u8], wide: &mut [WideGroup]) {
        let blocks = packed.chunks_exact(self.packed_block_bytes());
        for (block, wide) in blocks.zip(wide.chunks_exact_mut(self.groups())) {
            for (group, wide) in wide.iter_mut().enumerate() {
                self.widen(block, group, wide);
            }
        }
    }

    /// The values of a row of a packed panel, as the file's decoder gives them.
    pub(super) fn decode_row(&self, panel: &[u8], row: usize, values: &mut [f32]) {
        let blocks = panel.chunks_exact(self.packed_block_bytes());
        for (block, values) in blocks.zip(values.chunks_exact_mut(self.block_len())) {
            let (header, codes) = block.split_at(self.header_bytes());
            let header = Header { bytes: header, halves: self.half_fields.len() };
            let groups = values.as_chunks_mut::<GROUP>().0.iter_mut().zip(codes.chunks_exact(self.group_bytes()));
            for (group, (values, codes)) in groups.enumerate() {
                for (half, values) in values.chunks_exact_mut(GROUP / self.halves).enumerate() {
                    let (scale, min) = header.scale_and_min(self.dtype, group * self.halves + half, row);
                    // Minus zero changes no value, not even the sign of zero.
                    let min = if self.has_min { min } else { -0.0 };
                    for (run, values) in values.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                        let stored = self.stored_run(codes, half * (RUNS / self.halves) + run, row);
                        for (value, stored) in values.iter_mut().zip(stored) {
                            *value = scale * f32::from(self.code(stored)) + min;
                        }
                    }
                }
            }
        }
    }

    /// A run of one row as it is stored.
    fn stored_run(&self, codes: &[u8], run: usize, row: usize) -> [u8; 4] {
        let (mut stored, mut first) = ([0; 4], 0);
        for (shift, width) in planes(self.bits) {
            let (vector, at) = place(width, run);
            let bytes = &codes[first + 64 * vector + 4 * row..][..4];
            for (stored, byte) in stored.iter_mut().zip(bytes) {
                *stored |= (byte >> at & mask(width)) << shift;
            }
            first += 64 * width;
        }
        stored
    }

    /// The file's code of a stored one.
    const fn code(&self, stored: u8) -> i8 {
        match self.dtype {
            DType::Q8_0 => (stored ^ 0x80).cast_signed(),
            DType::IQ4_NL | DType::IQ4_XS => LEVELS[(stored & 15) as usize],
            _ if self.has_min => stored.cast_signed(),
            _ => stored.cast_signed() - self.centre,
        }
    }

    /// Group `group` of a packed block in the form that all types share.
    #[inline(always)]
    fn widen(&self, block: &[u8], group: usize, wide: &mut WideGroup) {
        let (header, codes) = block.split_at(self.header_bytes());
        let codes = &codes[group * self.group_bytes()..][..self.group_bytes()];
        for (run, vector) in wide.codes.iter_mut().enumerate() {
            let mut stored = [0; 4 * PANEL];
            let mut first = 0;
            for (shift, width) in planes(self.bits) {
                let (vector, at) = place(width, run);
                let bytes = &codes[first + 64 * vector..][..64];
                for (stored, byte) in stored.iter_mut().zip(bytes) {
                    *stored |= (byte >> at & mask(width)) << shift;
                }
                first += 64 * width;
            }
            let turned = 0x80 - self.centre.cast_unsigned();
            for (code, stored) in vector.as_flattened_mut().iter_mut().zip(stored) {
                *code = match self.dtype {
                    DType::Q8_0 => stored,
                    DType::IQ4_NL | DType::IQ4_XS => LEVELS[usize::from(stored & 15)].cast_unsigned() ^ 0x80,
                    _ => stored + turned,
                };
            }
        }
        let centre = if self.has_min { f32::from(self.centre) } else { 0.0 };
        let header = Header { bytes: header, halves: self.half_fields.len() };
        for half in 0..self.halves {
            for row in 0..PANEL {
                let (scale, min) = header.scale_and_min(self.dtype, group * self.halves + half, row);
                wide.scale[half][row] = scale;
                wide.min[half][row] = centre.mul_add(scale, min);
            }
        }
    }
}

/// Planes of a code: lowest bit of the code, bits (= vectors of the plane).
fn planes(bits: usize) -> impl Iterator<Item = (usize, usize)> {
    let low = match bits {
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    };
    [(0, low), (low, bits.saturating_sub(low))].into_iter().filter(|&(_, width)| width > 0)
}

/// Vector and lowest bit of a run in a plane of `width` bits.
const fn place(width: usize, run: usize) -> (usize, usize) {
    match width {
        4 => (run % 4, run / 4 * 4),
        2 => (run / 4, run % 4 * 2),
        1 => (0, run),
        _ => (run, 0),
    }
}

const fn mask(width: usize) -> u8 {
    if width == 8 { 0xff } else { (1 << width) - 1 }
}

/// Fields before the codes.
struct Header<'a> {
    bytes: &'a [u8],
    halves: usize,
}

impl Header<'_> {
    fn half_bits(&self, field: usize, row: usize) -> u16 {
        let at = 2 * (PANEL * field + row);
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn half(&self, field: usize, row: usize) -> f32 {
        f16_to_f32(self.half_bits(field, row))
    }

    fn byte(&self, field: usize, row: usize) -> u8 {
        self.bytes[2 * PANEL * self.halves + PANEL * field + row]
    }

    /// Scale and minimum of a group (of 16 or 32) of one row; the same arithmetic as in the file's decoder.
    fn scale_and_min(&self, dtype: DType, group: usize, row: usize) -> (f32, f32) {
        match dtype {
            DType::Q4_1 | DType::Q5_1 => (self.half(0, row), self.half(1, row)),
            DType::Q2_K => {
                let packed = self.byte(group, row);
                (self.half(0, row) * f32::from(packed & 15), -(self.half(1, row) * f32::from(packed >> 4)))
            }
            DType::Q3_K => {
                let low = self.byte(group % 8, row) >> (4 * (group / 8)) & 15;
                let high = self.byte(8 + group % 4, row) >> (2 * (group / 4)) & 3;
                (self.half(0, row) * f32::from((low | high << 4).cast_signed() - 32), 0.0)
            }
            DType::Q4_K | DType::Q5_K => {
                let (scale, min) = if group < 4 {
                    (self.byte(group, row) & 63, self.byte(group + 4, row) & 63)
                } else {
                    let (low, next) = (self.byte(group + 4, row), self.byte(group - 4, row));
                    (low & 15 | next >> 6 << 4, low >> 4 | self.byte(group, row) >> 6 << 4)
                };
                (self.half(0, row) * f32::from(scale), -(self.half(1, row) * f32::from(min)))
            }
            DType::Q6_K => (self.half(0, row) * f32::from(self.byte(group, row).cast_signed()), 0.0),
            DType::IQ4_XS => {
                let low = i16::from(self.byte(group / 2, row) >> (4 * (group % 2)) & 15);
                let high = (self.half_bits(1, row) >> (2 * group) & 3).cast_signed();
                (self.half(0, row) * f32::from((low | high << 4) - 32), 0.0)
            }
            _ => (self.half(0, row), 0.0),
        }
    }
}

const _: () = assert!(RUNS * 4 == GROUP);
