//! Strided views over operands. Input and output of an op may be the same memory, and threads write disjoint parts of one
//! output, so the views are raw; the op's entry checks sizes once and the kernels index within them.

use std::marker::PhantomData;

/// A matrix of `rows` x `cols` values, `stride` values apart; read-only.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    ptr: *const T,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// Values from row to row.
    pub stride: usize,
    life: PhantomData<&'a T>,
}

/// A matrix of `rows` x `cols` values, `stride` values apart; writable by several threads in disjoint parts.
#[derive(Debug, Clone, Copy)]
pub struct MatrixMut<'a, T> {
    ptr: *mut T,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// Values from row to row.
    pub stride: usize,
    life: PhantomData<&'a mut T>,
}

// SAFETY: a view gives out shared reads only through unsafe or bounds-checked calls; T is plain data.
unsafe impl<T: Sync> Send for Matrix<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Matrix<'_, T> {}
// SAFETY: disjointness of writes is the caller's duty in `row_mut`.
unsafe impl<T: Send> Send for MatrixMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for MatrixMut<'_, T> {}

impl<'a, T> Matrix<'a, T> {
    /// A dense matrix over a slice.
    ///
    /// # Panics
    /// If the slice is shorter than `rows * cols`.
    #[must_use]
    pub fn dense(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert!(data.len() >= rows * cols, "{} values for {rows} x {cols}", data.len());
        Self { ptr: data.as_ptr(), rows, cols, stride: cols, life: PhantomData }
    }

    /// A view over raw memory.
    ///
    /// # Safety
    /// `ptr` is aligned and valid for reads of `(rows - 1) * stride + cols` values for `'a`; nobody writes a row while it
    /// is read through a reference, except the kernel itself in place.
    #[must_use]
    pub const unsafe fn from_raw(ptr: *const T, rows: usize, cols: usize, stride: usize) -> Self {
        Self { ptr, rows, cols, stride, life: PhantomData }
    }

    /// Row `i`.
    ///
    /// # Panics
    /// If `i` is not below `rows`.
    #[must_use]
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row lies within the range promised at construction.
        unsafe { std::slice::from_raw_parts(self.ptr.add(i * self.stride), self.cols) }
    }

    /// Address of row `i`, for kernels that work in place and must not hold a reference.
    #[must_use]
    pub fn row_ptr(&self, i: usize) -> *const T {
        debug_assert!(i < self.rows);
        self.ptr.wrapping_add(i * self.stride)
    }
}

impl<'a, T> MatrixMut<'a, T> {
    /// A dense matrix over a slice.
    ///
    /// # Panics
    /// If the slice is shorter than `rows * cols`.
    #[must_use]
    pub fn dense(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        assert!(data.len() >= rows * cols, "{} values for {rows} x {cols}", data.len());
        Self { ptr: data.as_mut_ptr(), rows, cols, stride: cols, life: PhantomData }
    }

    /// A view over raw memory.
    ///
    /// # Safety
    /// As [`Matrix::from_raw`], for writes.
    #[must_use]
    pub const unsafe fn from_raw(ptr: *mut T, rows: usize, cols: usize, stride: usize) -> Self {
        Self { ptr, rows, cols, stride, life: PhantomData }
    }

    /// Row `i` for writing.
    ///
    /// # Safety
    /// No other reference to this row is alive: threads take different rows.
    ///
    /// # Panics
    /// If `i` is not below `rows`.
    #[must_use]
    pub unsafe fn row_mut(&self, i: usize) -> &'a mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: in range by construction, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(i * self.stride), self.cols) }
    }

    /// Address of row `i`, for kernels that write parts of a row.
    #[must_use]
    pub fn row_ptr(&self, i: usize) -> *mut T {
        debug_assert!(i < self.rows);
        self.ptr.wrapping_add(i * self.stride)
    }
}
