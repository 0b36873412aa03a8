//! The ways to compute a product. All give the same bits; which is fastest differs from processor to processor.

use super::activations::MAX_WIDTH;
use crate::isa::Isa;

/// Numbers of rows to try as the most that are multiplied straight from the packed form.
const OTHER_FEW: [usize; 4] = [1, 4, 12, 1024];
/// Bytes of activations that a block may take, so that they stay in a second-level cache of 1 MiB.
const BLOCK_KIB: usize = 640;
/// Others to try: for smaller and for larger caches.
const OTHER_BLOCKS: [usize; 2] = [256, 1280];

/// A choice of instructions and of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Way {
    /// Instructions.
    pub isa: Isa,
    /// One-row products ask for memory ahead (needs AVX-512).
    pub ahead: bool,
    /// Most rows that are multiplied straight from the packed form; with two scales in 32 inputs no more than a tile has.
    pub few: usize,
    /// KiB of activations in a block.
    pub block_kib: usize,
}

impl From<Isa> for Way {
    fn from(isa: Isa) -> Self {
        let isa = isa.supported();
        // Until unpacking once for all rows, or tile registers, cost less.
        let few = match isa {
            Isa::Amx => 12,
            Isa::Avx512 => 64,
            Isa::Avx2 => 8,
            Isa::Neon | Isa::Scalar => 1,
        };
        Self { isa, ahead: isa == Isa::Amx, few, block_kib: BLOCK_KIB }
    }
}

/// How a panel meets a block of rows of rounded activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// One row: the weight is read once, as a stream.
    OneRow {
        /// Memory is asked for ahead.
        ahead: bool,
    },
    /// A few rows: the same, each group of inputs multiplied with all of them.
    FewRows {
        /// Memory is asked for ahead.
        ahead: bool,
    },
    /// The panel is unpacked by stretches, each multiplied with tiles of rows in vector registers.
    Vectors,
    /// The same in tile registers.
    Tiles,
}

impl Way {
    /// The path for a block of so many rows, whose sums have so many scales in 32 inputs.
    pub(crate) const fn path(self, rows: usize, subgroups: usize) -> Path {
        match self.isa {
            Isa::Scalar => Path::Vectors,
            _ if rows == 1 => Path::OneRow { ahead: self.ahead },
            // Two scales in 32 inputs take so long to unpack that once for all rows is better from two tiles on.
            _ if rows <= self.few && (subgroups == 1 || rows <= MAX_WIDTH) => Path::FewRows { ahead: self.ahead },
            #[cfg(target_arch = "x86_64")]
            Isa::Amx if super::amx::pays(rows, subgroups) => Path::Tiles,
            _ => Path::Vectors,
        }
    }

    /// Rows from which on another path is taken, ascending, each with its path; the first is for one row.
    pub(crate) fn paths(self, subgroups: usize) -> Vec<(usize, Path)> {
        let mut paths: Vec<(usize, Path)> = Vec::new();
        for rows in 1..=(2 * MAX_WIDTH).max(self.few + 1) {
            let path = self.path(rows, subgroups);
            if paths.last().is_none_or(|(_, last)| *last != path) {
                paths.push((rows, path));
            }
        }
        paths
    }

    /// Short name: `amx`, `avx512-ahead`, `amx-block256`.
    #[must_use]
    pub fn name(self) -> String {
        let default = Self::from(self.isa);
        let ahead = match (default.ahead, self.ahead) {
            (false, true) => "-ahead",
            (true, false) => "-plain",
            _ => "",
        };
        let block = if self.block_kib == BLOCK_KIB { String::new() } else { format!("-block{}", self.block_kib) };
        let few = if self.few == default.few { String::new() } else { format!("-few{}", self.few) };
        format!("{}{ahead}{few}{block}", self.isa.name())
    }

    /// Every way that this processor has up to `isa`, the usual one first. Portable code is among them only where there is nothing else.
    #[must_use]
    pub fn all(isa: Isa) -> Vec<Self> {
        let mut ways = vec![Self::from(isa)];
        if isa >= Isa::Avx512 {
            ways.push(Self { ahead: isa != Isa::Amx, ..ways[0] });
        }
        if isa != Isa::Scalar {
            let default = ways[0];
            ways.extend(OTHER_FEW.into_iter().filter(|few| *few != default.few).map(|few| Self { few, ..default }));
        }
        ways.extend(OTHER_BLOCKS.map(|block_kib| Self { block_kib, ..ways[0] }));
        let vector = |lower: &Isa| *lower < isa && *lower != Isa::Scalar;
        ways.extend(Isa::available().into_iter().filter(vector).map(Self::from));
        ways
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_different_and_paths_cover_all_rows() {
        for isa in Isa::available() {
            let ways = Way::all(isa);
            let names: std::collections::BTreeSet<String> = ways.iter().map(|way| way.name()).collect();
            assert_eq!(names.len(), ways.len());
            for way in ways {
                assert!(way.name().len() < 32);
                for subgroups in 1..=2 {
                    let paths = way.paths(subgroups);
                    assert_eq!(paths.first().map(|(rows, _)| *rows), Some(1));
                    for rows in 1..200 {
                        let listed = paths.iter().rev().find(|(first, _)| *first <= rows).map(|(_, path)| *path);
                        assert_eq!(listed, Some(way.path(rows, subgroups)), "{} at {rows}", way.name());
                    }
                }
            }
        }
    }
}
