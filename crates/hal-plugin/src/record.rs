//! Records, arrays and texts that cross the boundary.

use std::mem::MaybeUninit;

use qwen_hal_abi::{qhal_manifest, qhal_plugin_api, qhal_str};

use crate::Failure;

/// A plugin's manifest or table, as a `static`.
#[derive(Debug)]
pub struct Static<T>(pub T);

// SAFETY: plain data. Whoever follows a pointer of it answers for what is there.
unsafe impl Sync for Static<qhal_manifest> {}
// SAFETY: as above.
unsafe impl Sync for Static<qhal_plugin_api> {}

/// Text that is there for ever.
#[must_use]
pub const fn static_text(text: &'static str) -> qhal_str {
    qhal_str { data: text.as_ptr(), len: text.len() as u64 }
}

/// Writes text with a zero behind it, cut between characters if it is too long.
pub fn write_text<const N: usize>(to: &mut [u8; N], text: &str) {
    to.fill(0);
    let end = text.floor_char_boundary(N.saturating_sub(1));
    for (to, from) in to.iter_mut().zip(text.as_bytes().iter().take(end)) {
        *to = *from;
    }
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `out` is null or room for the answer.
///
/// # Errors
/// If it is null.
pub unsafe fn answer<T>(out: *mut T, value: T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::invalid("no room for the answer"));
    }
    // SAFETY: by the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// The size that a record states, if it is enough for a `T`.
///
/// # Safety
/// `record` is null or begins with its size.
unsafe fn check_size<T>(record: *const T, what: &str) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    let size = if record.is_null() { 0 } else { unsafe { record.cast::<u32>().read() } };
    if (size as usize) < size_of::<T>() {
        return Err(Failure::invalid(format!("a {what} of {size} bytes, expected {} or more", size_of::<T>())));
    }
    Ok(())
}

/// The caller's record, if it is at least as large as ours.
///
/// # Safety
/// `out` is null or a record of the size that its first field states, nobody else's for `'a`.
///
/// # Errors
/// If it is null or too small.
pub unsafe fn sized<'a, T>(out: *mut T) -> Result<&'a mut T, Failure> {
    // SAFETY: by the caller's promise; not null and large enough where it is followed.
    unsafe {
        check_size(out, "record")?;
        Ok(&mut *out)
    }
}

/// The caller's description, if it is at least as large as ours.
///
/// # Safety
/// `desc` is null or a record of the size that its first field states, unchanged for `'a`.
///
/// # Errors
/// If it is null or too small.
pub unsafe fn sized_ref<'a, T>(desc: *const T) -> Result<&'a T, Failure> {
    // SAFETY: as above.
    unsafe {
        check_size(desc, "description")?;
        Ok(&*desc)
    }
}

/// A plain array of the host.
///
/// # Safety
/// `data` is null or valid for `len` elements for `'a`.
///
/// # Errors
/// If it is null and should hold something.
pub unsafe fn array<'a, T>(data: *const T, len: u32) -> Result<&'a [T], Failure> {
    match (len, data.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(Failure::invalid(format!("a null array, expected {len} elements"))),
        // SAFETY: by the caller's promise.
        (len, false) => Ok(unsafe { std::slice::from_raw_parts(data, len as usize) }),
    }
}

/// Element `i` of an array of growable structs, cut or filled with zeros to our version of it.
///
/// # Safety
/// `array` has more than `i` elements, as large as the first one states, and all zeros are a `T`.
pub unsafe fn element<T: Copy>(array: *const T, i: usize) -> T {
    // SAFETY: by the caller's promise; every element begins with its size.
    unsafe {
        let stride = (array.cast::<u32>().read() as usize).max(size_of::<u32>());
        let mut own = MaybeUninit::<T>::zeroed();
        let at = array.cast::<u8>().add(i * stride);
        std::ptr::copy_nonoverlapping(at, own.as_mut_ptr().cast::<u8>(), stride.min(size_of::<T>()));
        own.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Grown {
        struct_size: u32,
        old: u32,
        new: u64,
    }

    #[test]
    fn a_record_must_be_as_large_as_ours() {
        let mut record = Grown { struct_size: 16, old: 1, new: 2 };
        // SAFETY: records that state their size, and null.
        unsafe {
            assert_eq!(sized(&raw mut record).unwrap().new, 2);
            record.struct_size = 12;
            let failure = sized_ref(&raw const record).unwrap_err();
            assert_eq!(failure.message, "a description of 12 bytes, expected 16 or more");
            assert_eq!(
                sized::<Grown>(std::ptr::null_mut()).unwrap_err().message,
                "a record of 0 bytes, expected 16 or more"
            );
        }
    }

    #[test]
    fn arrays_are_walked_by_the_size_that_their_elements_state() {
        let (older, newer) = ([8_u32, 1, 8, 2], [24_u32, 1, 5, 0, 9, 9, 24, 2, 6, 0, 9, 9]);
        let grown = |old, new, struct_size| Grown { struct_size, old, new };
        // SAFETY: two elements each, of 8 and of 24 bytes.
        unsafe {
            let both = |array: *const u32| [0, 1].map(|i| element(array.cast::<Grown>(), i));
            assert_eq!(both(older.as_ptr()), [grown(1, 0, 8), grown(2, 0, 8)]);
            assert_eq!(both(newer.as_ptr()), [grown(1, 5, 24), grown(2, 6, 24)]);
            assert!(array(std::ptr::null::<u8>(), 0).unwrap().is_empty());
            assert!(array(std::ptr::null::<u8>(), 1).is_err());
        }
    }

    #[test]
    fn texts_end_with_a_zero() {
        let mut to = [b'x'; 4];
        write_text(&mut to, "añb");
        assert_eq!(&to, b"a\xc3\xb1\0");
        write_text(&mut to, "abñ");
        assert_eq!(&to, b"ab\0\0");
    }
}
