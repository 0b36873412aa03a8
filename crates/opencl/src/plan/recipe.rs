//! An op as data: which kernels run, with which arguments, over which sizes.
//!
//! Making one needs no device memory and builds no program, so the same function answers `op_supports` and `plan_create`.

use std::ops::RangeInclusive;

use super::desc::{Extent, Mat, Place, Vector};
use super::types;
use super::variants::Choice;
use crate::failure::Failure;
use crate::program::Kernels;

/// One argument of a kernel. Operands take two, the buffer and the byte at which they begin.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arg {
    /// An operand, so many bytes behind its beginning.
    Operand(Place, u64),
    /// The workspace, so many bytes behind its beginning.
    Workspace(u64),
    /// An operand that is not there.
    Absent,
    Int(i32),
    Real(f32),
    /// The value of a launch.
    Size(Extent),
    /// Elements from row to row at the launch.
    Stride(Mat),
    /// The words for faults of the stream.
    Faults,
}

impl Arg {
    pub(super) fn mat(mat: &Mat) -> Self {
        Self::Operand(mat.place, 0)
    }
    pub(super) fn vector(vector: &Vector) -> Self {
        Self::Operand(vector.place, 0)
    }
    pub(super) fn optional(mat: Option<&Mat>) -> Self {
        mat.map_or(Self::Absent, Self::mat)
    }
    pub(super) const fn int(n: usize) -> Self {
        // Descriptions with larger sizes are refused.
        Self::Int(n as i32)
    }
    pub(super) fn flag(set: bool) -> Self {
        Self::Int(i32::from(set))
    }
}

/// Work-items of a dimension: (ceil(size / per) + more) * times.
#[derive(Debug, Clone, Copy)]
pub(super) struct Count {
    pub(super) size: Extent,
    pub(super) per: usize,
    pub(super) more: usize,
    pub(super) times: usize,
}

impl Count {
    pub(super) const fn of(size: Extent) -> Self {
        Self { size, per: 1, more: 0, times: 1 }
    }
    pub(super) const fn fixed(n: usize) -> Self {
        Self::of(Extent::fixed(n))
    }
    /// One for each `per`.
    pub(super) const fn each(size: Extent, per: usize) -> Self {
        Self { per, ..Self::of(size) }
    }
    /// Whole groups of `local` for one work-item each `per`.
    pub(super) const fn groups(n: usize, per: usize, local: usize) -> Self {
        Self { size: Extent::fixed(n), per: per * local, more: 0, times: local }
    }
    pub(super) fn value(&self, symbols: &[i64]) -> Result<usize, Failure> {
        Ok((self.size.value(symbols)?.div_ceil(self.per) + self.more) * self.times)
    }
}

/// One kernel's run.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) kernels: Kernels,
    pub(super) name: String,
    pub(super) args: Vec<Arg>,
    pub(super) global: [Count; 3],
    /// As the kernel demands.
    pub(super) local: usize,
    /// Only in launches of this size.
    pub(super) when: Option<(Extent, RangeInclusive<usize>)>,
}

/// A weight that is brought into panels once.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    pub(super) input: usize,
    pub(super) layout: u32,
    pub(super) kernels: Kernels,
    pub(super) experts: usize,
    pub(super) rows: usize,
    /// Units of a row, and their bytes.
    pub(super) units: usize,
    pub(super) unit_bytes: usize,
}

/// Rows of a panel, as in `kernels/vector.cl`.
pub(super) const PANEL: usize = 16;

impl Packed {
    pub(super) const fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }
    pub(super) const fn source_bytes(&self) -> u64 {
        (self.experts * self.rows * self.units * self.unit_bytes) as u64
    }
    pub(super) const fn packed_bytes(&self) -> u64 {
        (self.experts * self.panels() * PANEL * self.units * self.unit_bytes) as u64
    }
}

/// What an operand must hold at a launch.
#[derive(Debug, Clone, Copy)]
enum Need {
    Mat(Mat),
    /// So many values more than the vector says.
    Vector(Vector, usize),
    Bytes(u64),
}

/// A planned op.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    /// For people.
    pub(super) kernel: String,
    operands: Vec<(Place, Need)>,
    pub(super) steps: Vec<Step>,
    pub(super) packed: Vec<Packed>,
    /// How it is cut, if it could be cut otherwise.
    pub(super) choice: Option<Choice>,
    /// Bit n: output 0 may be input n.
    pub(super) in_place: u64,
    pub(super) workspace_bytes: u64,
    pub(super) flops: f64,
    pub(super) bytes_read: f64,
    pub(super) bytes_written: f64,
}

impl Recipe {
    pub(super) fn new(kernel: impl Into<String>) -> Self {
        Self {
            kernel: kernel.into(),
            operands: Vec::new(),
            steps: Vec::new(),
            packed: Vec::new(),
            choice: None,
            in_place: 0,
            workspace_bytes: 0,
            flops: 0.0,
            bytes_read: 0.0,
            bytes_written: 0.0,
        }
    }
    fn operand(mut self, place: Place, need: Need, bytes: f64) -> Self {
        self.operands.push((place, need));
        match place {
            Place::In(_) => self.bytes_read += bytes,
            Place::Out(_) => self.bytes_written += bytes,
        }
        self
    }
    pub(super) fn with(self, mat: &Mat) -> Self {
        self.operand(mat.place, Need::Mat(*mat), mat.expected_bytes())
    }
    pub(super) fn with_vector(self, vector: &Vector) -> Self {
        self.with_longer(vector, 0)
    }
    /// A vector whose slice holds `more` values than its dimension says.
    pub(super) fn with_longer(self, vector: &Vector, more: usize) -> Self {
        let bytes = (vector.len.expected + more) * types::block(vector.dtype).1;
        self.operand(vector.place, Need::Vector(*vector, more), bytes as f64)
    }
    /// An operand that has another form than its description says.
    pub(super) fn with_bytes(self, place: Place, bytes: u64, read: f64) -> Self {
        self.operand(place, Need::Bytes(bytes), read)
    }
    pub(super) const fn in_place(mut self, input: usize) -> Self {
        self.in_place |= 1 << input;
        self
    }
    pub(super) const fn flops(mut self, flops: f64) -> Self {
        self.flops = flops;
        self
    }
    /// A run over groups of `local` work-items.
    pub(super) fn step(
        mut self,
        kernels: Kernels,
        name: impl Into<String>,
        args: Vec<Arg>,
        global: [Count; 3],
        local: usize,
    ) -> Self {
        self.steps.push(Step { kernels, name: name.into(), args, global, local, when: None });
        self
    }

    /// Each operand and the bytes that it must hold.
    pub(super) fn needs(&self, symbols: &[i64]) -> impl Iterator<Item = Result<(Place, u64), Failure>> {
        self.operands.iter().map(move |(place, need)| {
            let bytes = match need {
                Need::Mat(mat) => mat.bytes(symbols)?,
                Need::Vector(vector, more) => {
                    ((vector.len.value(symbols)? + more) * types::block(vector.dtype).1) as u64
                }
                Need::Bytes(bytes) => *bytes,
            };
            Ok((*place, bytes))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_in_whole_groups() {
        let value = |count: Count| count.value(&[]).unwrap_or(usize::MAX);
        assert_eq!(value(Count::groups(130, 16, 8)), 16);
        assert_eq!(value(Count::groups(128, 16, 8)), 8);
        assert_eq!(value(Count::fixed(0)), 0);
        assert_eq!(value(Count { more: 3, times: 2, ..Count::each(Extent::fixed(9), 4) }), 12);
    }

    #[test]
    fn panels_are_whole() {
        let packed = |rows| Packed {
            input: 1,
            layout: 0,
            kernels: Kernels::default(),
            experts: 3,
            rows,
            units: 10,
            unit_bytes: 2,
        };
        assert_eq!((packed(16).source_bytes(), packed(16).packed_bytes()), (960, 960));
        assert_eq!((packed(17).source_bytes(), packed(17).packed_bytes()), (1020, 1920));
    }
}
