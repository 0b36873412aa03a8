//! The extension `variants`: its records, as plugins fill them.

use qwen_hal_abi::{QHAL_VARIANT_CHOSEN, qhal_str, qhal_variant};

use crate::failure::Failure;
use crate::record::{array, sized, write_text};

/// Symbol of a launch, and its smallest and largest value.
pub type VariantRange = (u32, i64, i64);

/// The record of a variant; without a range it takes all launches.
#[must_use]
pub fn variant_record(
    name: &str,
    family: &str,
    tiling: &str,
    range: Option<VariantRange>,
    is_chosen: bool,
) -> qhal_variant {
    let (symbol, min, max) = range.unwrap_or((u32::MAX, 0, i64::MAX));
    let mut record = qhal_variant {
        struct_size: size_of::<qhal_variant>() as u32,
        flags: if is_chosen { QHAL_VARIANT_CHOSEN } else { 0 },
        symbol,
        reserved: 0,
        min,
        max,
        family: [0; 32],
        tiling: [0; 64],
        name: [0; 32],
    };
    write_text(&mut record.family, family);
    write_text(&mut record.tiling, tiling);
    write_text(&mut record.name, name);
    record
}

/// Answers for variant number `index` of those that a plan has.
///
/// # Errors
/// If there are not so many.
///
/// # Safety
/// `out` is null or a record of the size that it states.
pub unsafe fn write_variant<V>(
    variants: &[V],
    index: u32,
    record: impl Fn(&V) -> qhal_variant,
    out: *mut qhal_variant,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let out = unsafe { sized(out)? };
    let variant = variants.get(index as usize);
    let variant = variant.ok_or_else(|| Failure::out_of_range(format!("of {} variants", variants.len())))?;
    *out = qhal_variant { struct_size: out.struct_size, ..record(variant) };
    Ok(())
}

/// The one that a host asked for by name.
///
/// # Errors
/// If there is none of this name.
///
/// # Safety
/// `name` is readable.
pub unsafe fn variant_named<V>(
    variants: impl IntoIterator<Item = V>,
    name_of: impl Fn(&V) -> String,
    name: qhal_str,
) -> Result<V, Failure> {
    // SAFETY: the caller's promise.
    let name = unsafe { array(name.data, u32::try_from(name.len).unwrap_or(u32::MAX))? };
    let mut names = Vec::new();
    for variant in variants {
        let known = name_of(&variant);
        if known.as_bytes() == name {
            return Ok(variant);
        }
        names.push(known);
    }
    let found = String::from_utf8_lossy(name);
    Err(Failure::unsupported(format!("variant {found:?}, expected one of {}", names.join(", "))))
}
