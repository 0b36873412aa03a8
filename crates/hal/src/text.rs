//! Text that crosses the boundary. What comes from a plugin is data of unknown quality: it is cut, repaired and never trusted
//! to be terminated.

use qwen_hal_abi::qhal_str;

/// Longest string accepted from a plugin, in bytes.
const MAX_TEXT: u64 = 4096;

/// A borrowed string for the other side; valid as long as `text`.
pub(crate) const fn as_str(text: &str) -> qhal_str {
    qhal_str { data: text.as_ptr(), len: text.len() as u64 }
}

/// The text of a fixed array, up to the first zero or the end.
pub(crate) fn fixed_text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

/// A copy of a string of the other side, cut to 4 KiB.
///
/// # Safety
/// Unless `data` is null, `len` bytes at `data` are readable.
pub(crate) unsafe fn copy_text(text: qhal_str) -> String {
    if text.data.is_null() || text.len == 0 {
        return String::new();
    }
    // SAFETY: readable by the caller's promise; the length only shrinks.
    let bytes = unsafe { std::slice::from_raw_parts(text.data, text.len.min(MAX_TEXT) as usize) };
    String::from_utf8_lossy(bytes).into_owned()
}
