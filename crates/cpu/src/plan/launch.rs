//! A launch: slices become views after their bounds and alignment are checked, symbols become sizes. Allocates nothing unless it
//! refuses.

use qwen_hal_abi::{qhal_launch_args, qhal_slice};

use super::desc::{Extent, In, Mat, Out, Place, Vector};
use crate::api::{Failure, buffer_of_slice};
use crate::isa::Isa;
use crate::kernels::gemm::Way;
use crate::matrix::{Matrix, MatrixMut};
use crate::parallel::Parallel;

/// Plain values: any bytes are one.
///
/// # Safety
/// Implemented only for such types.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: every bit pattern is a value.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}

/// Operands and sizes of a launch, and what it runs on.
#[derive(Clone, Copy)]
pub(super) struct Launch<'a> {
    inputs: &'a [qhal_slice],
    outputs: &'a [qhal_slice],
    workspace: &'a qhal_slice,
    symbols: &'a [i64],
    pub(super) isa: Isa,
    pub(super) way: Way,
    pub(super) parallel: &'a dyn Parallel,
}

/// An array of the host.
///
/// # Safety
/// `data` is null or valid for `len` elements for `'a`.
unsafe fn array<'a, T>(data: *const T, len: u32) -> Result<&'a [T], Failure> {
    match (len, data.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Failure::invalid("a null array of operands or symbols")),
        // SAFETY: by the caller's promise.
        (len, false) => Ok(unsafe { std::slice::from_raw_parts(data, len as usize) }),
    }
}

impl<'a> Launch<'a> {
    /// A launch that the host asked for.
    ///
    /// # Safety
    /// `args` is null or valid for `'a` with its arrays; buffers are alive; nobody else writes the operands or reads the
    /// outputs meanwhile.
    pub(super) unsafe fn new(
        args: *const qhal_launch_args,
        way: Way,
        parallel: &'a dyn Parallel,
    ) -> Result<Self, Failure> {
        // SAFETY: by the caller's promise.
        unsafe {
            let args = args.as_ref().filter(|args| args.struct_size as usize >= size_of::<qhal_launch_args>());
            let args = args.ok_or_else(|| Failure::invalid("no launch arguments, or of an unknown size"))?;
            Ok(Self {
                inputs: array(args.inputs, args.num_inputs)?,
                outputs: array(args.outputs, args.num_outputs)?,
                workspace: &args.workspace,
                symbols: array(args.symbol_values, args.num_symbols)?,
                isa: way.isa,
                way,
                parallel,
            })
        }
    }

    /// The size of this launch.
    pub(super) fn extent(&self, extent: Extent) -> Result<usize, Failure> {
        extent.value(self.symbols).ok_or_else(|| {
            Failure::out_of_range(format!("a symbol is missing, or its size exceeds the planned {}", extent.max))
        })
    }

    /// The first of `count` values of an operand.
    fn values<T: Plain>(&self, place: Place, count: usize, write: bool) -> Result<*mut T, Failure> {
        let slice = match place {
            In(i) => self.inputs.get(i),
            Out(i) => self.outputs.get(i),
        };
        let slice = slice.ok_or_else(|| Failure::invalid(format!("{place} is missing")))?;
        Self::resolve(slice, count, write).map_err(|failure| {
            let failure = failure.about(place);
            if let In(i) = place { failure.at(i) } else { failure }
        })
    }

    fn resolve<T: Plain>(slice: &qhal_slice, count: usize, write: bool) -> Result<*mut T, Failure> {
        let bytes = count.checked_mul(size_of::<T>()).map_or(u64::MAX, |bytes| bytes as u64);
        if slice.size < bytes {
            return Err(Failure::out_of_range(format!("{} bytes, expected {bytes}", slice.size)));
        }
        // SAFETY: the buffer is alive, by the promise at `new`.
        let at = unsafe { buffer_of_slice(slice) }?.range(slice.offset, bytes, write)?.cast::<T>();
        if !at.is_aligned() {
            return Err(Failure::invalid(format!("an address that is no multiple of {}", align_of::<T>())));
        }
        Ok(at.as_ptr())
    }

    /// Rows, columns, stride, and values from the first to the last.
    fn shape(&self, mat: &Mat) -> Result<(usize, usize, usize, usize), Failure> {
        let (rows, cols) = (self.extent(mat.rows)?, self.extent(mat.cols)?);
        let stride = if mat.stride == 0 { cols } else { mat.stride };
        let count = match rows.checked_sub(1) {
            None => 0,
            Some(steps) => steps.checked_mul(stride).and_then(|n| n.checked_add(cols)).unwrap_or(usize::MAX),
        };
        Ok((rows, cols, stride, count))
    }

    /// A matrix to read.
    pub(super) fn mat<T: Plain>(&self, mat: &Mat) -> Result<Matrix<'a, T>, Failure> {
        let (rows, cols, stride, count) = self.shape(mat)?;
        let at = self.values::<T>(mat.place, count, false)?;
        // SAFETY: aligned, and `count` values lie within a living buffer.
        Ok(unsafe { Matrix::from_raw(at, rows, cols, stride) })
    }

    /// A matrix to write.
    pub(super) fn mat_mut<T: Plain>(&self, mat: &Mat) -> Result<MatrixMut<'a, T>, Failure> {
        let (rows, cols, stride, count) = self.shape(mat)?;
        let at = self.values::<T>(mat.place, count, true)?;
        // SAFETY: as above, and the buffer is writable.
        Ok(unsafe { MatrixMut::from_raw(at, rows, cols, stride) })
    }

    /// A matrix to read as bytes.
    pub(super) fn byte_mat(&self, mat: &Mat) -> Result<Matrix<'a, u8>, Failure> {
        self.mat(&in_bytes(mat)?)
    }
    /// A matrix to write as bytes.
    pub(super) fn byte_mat_mut(&self, mat: &Mat) -> Result<MatrixMut<'a, u8>, Failure> {
        self.mat_mut(&in_bytes(mat)?)
    }

    /// The first byte of a matrix whose rows are taken apart by somebody else.
    pub(super) fn address(&self, mat: &Mat, write: bool) -> Result<*mut u8, Failure> {
        let (.., count) = self.shape(&in_bytes(mat)?)?;
        let at = self.values::<u8>(mat.place, count, write)?;
        if !at.addr().is_multiple_of(mat.dtype.block_bytes()) {
            return Err(Failure::invalid(format!("{}: an address that cuts an element", mat.place)));
        }
        Ok(at)
    }

    /// `count` values to read.
    pub(super) fn slice<T: Plain>(&self, place: Place, count: usize) -> Result<&'a [T], Failure> {
        let at = self.values::<T>(place, count, false)?;
        // SAFETY: aligned, within a living buffer, not written meanwhile; buffers are never uninitialised.
        Ok(unsafe { std::slice::from_raw_parts(at, count) })
    }

    /// `count` values to write.
    pub(super) fn slice_mut<T: Plain>(&self, place: Place, count: usize) -> Result<&'a mut [T], Failure> {
        let at = self.values::<T>(place, count, true)?;
        // SAFETY: as above, and nobody else uses an output meanwhile.
        Ok(unsafe { std::slice::from_raw_parts_mut(at, count) })
    }

    /// The values of a vector and one more.
    pub(super) fn vector_and_end<T: Plain>(&self, vector: &Vector) -> Result<&'a [T], Failure> {
        self.slice(vector.place, self.extent(vector.len)?.saturating_add(1))
    }

    /// A vector to read.
    pub(super) fn vector<T: Plain>(&self, vector: &Vector) -> Result<&'a [T], Failure> {
        self.slice(vector.place, self.extent(vector.len)?)
    }
    /// A vector to write.
    pub(super) fn vector_mut<T: Plain>(&self, vector: &Vector) -> Result<&'a mut [T], Failure> {
        self.slice_mut(vector.place, self.extent(vector.len)?)
    }

    /// The workspace.
    pub(super) fn workspace(&self, bytes: usize) -> Result<&'a mut [u8], Failure> {
        if bytes == 0 {
            return Ok(&mut []);
        }
        let at = Self::resolve::<u8>(self.workspace, bytes, true).map_err(|failure| failure.about("workspace"))?;
        // SAFETY: within a living buffer that nobody else uses meanwhile.
        Ok(unsafe { std::slice::from_raw_parts_mut(at, bytes) })
    }
}

/// The same matrix with bytes as elements.
fn in_bytes(mat: &Mat) -> Result<Mat, Failure> {
    let scale = |n: usize| n.checked_mul(mat.dtype.block_bytes());
    let cols = mat.cols.as_fixed().and_then(scale);
    let (Some(cols), Some(stride)) = (cols, scale(mat.stride)) else {
        return Err(Failure::invalid("a matrix beyond the address space"));
    };
    Ok(Mat { cols: Extent::fixed(cols), stride, ..*mat })
}
