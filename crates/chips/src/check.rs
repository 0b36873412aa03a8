//! Checks beyond the form of a sheet: whoever reads a [`Chip`] can rely on finite numbers in range, known sources and printable text.

use toml::{Table, Value};

use crate::sheet::{Chip, Simulation, Source};

/// Larger figures are mistakes: 1e18 operations per second is a thousand times today's largest chip.
const LARGEST: f64 = 1e18;
/// Longer text is not a name or a sentence.
const LONGEST_TEXT: usize = 1000;
/// Longer keys are not names.
const LONGEST_NAME: usize = 100;
/// Tables within tables; the form itself needs six.
const DEEPEST: usize = 12;

/// What is wrong with a sheet: the place, what was expected, what was found.
pub(crate) fn check(table: &Table, chip: &Chip) -> Result<(), String> {
    if chip.format != 1 {
        return Err(format!(
            "format: expected 1, found {}; this program is too old or too new for the sheet",
            chip.format
        ));
    }
    for (key, value) in table {
        walk(key, value, &chip.sources, 0)?;
    }
    let names = std::iter::once(&chip.name).chain(&chip.aliases);
    for name in names {
        is_name("name", name)?;
    }
    is_name("plugin", &chip.plugin)?;
    for (source, Source { title, .. }) in &chip.sources {
        if title.is_empty() {
            return Err(format!("sources.{source}.title: expected where the figures come from, found nothing"));
        }
    }
    if let Some(short) = chip.matches.iter().find(|text| text.len() < 3) {
        return Err(format!(
            "matches: expected at least 3 characters, as a beginning of device names, found \"{short}\""
        ));
    }
    for alignment in
        [&chip.alignment.required, &chip.alignment.preferred, &chip.alignment.row_pitch].into_iter().flatten()
    {
        if !power_of_two(alignment.value) {
            return Err(format!("alignment: expected powers of two in bytes, found {}", alignment.value));
        }
    }
    for (key, figure) in
        [("granularity", &chip.allocator.granularity), ("large_granularity", &chip.allocator.large_granularity)]
    {
        if figure.as_ref().is_some_and(|figure| !power_of_two(figure.value)) {
            return Err(format!("allocator.{key}: expected a power of two in bytes"));
        }
    }
    if chip.allocator.kind.is_some() != chip.allocator.kind_source.is_some() {
        return Err(
            "allocator: expected kind and kind_source together; a kind without a source belongs to simulation".into()
        );
    }
    if let Some(source) = chip.allocator.kind_source.as_ref().filter(|source| !chip.sources.contains_key(*source)) {
        return Err(format!("allocator.kind_source: \"{source}\" is no entry of sources"));
    }
    if let Some(tile) =
        chip.compute.tiles.iter().find(|tile| tile.shape.iter().any(|side| !(1..=1 << 16).contains(side)))
    {
        return Err(format!("compute.tiles: expected sides of 1 to 65536, found {:?}", tile.shape));
    }
    dispatch(chip)?;
    simulation(&chip.simulation)
}

fn dispatch(chip: &Chip) -> Result<(), String> {
    for family in &chip.dispatch.families {
        if let (Some(min), Some(limit)) = (family.min_bandwidth, family.below_bandwidth)
            && min >= limit
        {
            return Err(format!(
                "dispatch.families: \"{}\" holds for no bandwidth, its min_bandwidth {min:e} is not less than its \
                 below_bandwidth {limit:e}",
                family.name
            ));
        }
    }
    for tiling in &chip.dispatch.tilings {
        let place = format!("dispatch.tilings: \"{}\"", tiling.name);
        if !is_op(&tiling.op) {
            return Err(format!("{place}: \"{}\" is no op of the vocabulary", tiling.op));
        }
        if let Some(family) = &tiling.family
            && !chip.dispatch.families.iter().any(|known| known.name == *family)
        {
            return Err(format!("{place}: \"{family}\" is no entry of dispatch.families"));
        }
        for (variable, bounds) in &tiling.when {
            if let (Some(min), Some(max)) = (bounds.min, bounds.max)
                && min > max
            {
                return Err(format!(
                    "{place}: {} holds for no value, min {min} is more than max {max}",
                    variable.name()
                ));
            }
        }
    }
    Ok(())
}

fn simulation(simulation: &Simulation) -> Result<(), String> {
    let Simulation {
        allocator: _,
        granularity,
        launch_ns,
        copy_latency_ns,
        host_bandwidth,
        link_latency_ns,
        compute_efficiency,
        bandwidth_efficiency,
    } = simulation;
    if !granularity.is_power_of_two() || *granularity > 1 << 30 {
        return Err(format!("simulation.granularity: expected a power of two up to 2^30 bytes, found {granularity}"));
    }
    let shares = [("compute_efficiency", compute_efficiency), ("bandwidth_efficiency", bandwidth_efficiency)];
    if let Some((key, value)) = shares.into_iter().find(|(_, value)| !(**value > 0.0 && **value <= 1.0)) {
        return Err(format!("simulation.{key}: expected a share above 0 and up to 1, found {value}"));
    }
    if *host_bandwidth <= 0.0 {
        return Err("simulation.host_bandwidth: expected bytes per second above 0".into());
    }
    let times = [("launch_ns", launch_ns), ("copy_latency_ns", copy_latency_ns), ("link_latency_ns", link_latency_ns)];
    match times.into_iter().find(|(_, value)| **value > 1e10) {
        Some((key, value)) => Err(format!("simulation.{key}: expected at most 1e10 nanoseconds, found {value}")),
        None => Ok(()),
    }
}

/// Numbers are finite and not negative, text is printable, and whatever names a source names one that there is.
fn walk(
    path: &str,
    value: &Value,
    sources: &std::collections::BTreeMap<String, Source>,
    depth: usize,
) -> Result<(), String> {
    if depth > DEEPEST {
        return Err(format!("{path}: nested deeper than {DEEPEST} tables"));
    }
    match value {
        Value::Float(number) if !(number.is_finite() && (0.0..=LARGEST).contains(number)) => {
            Err(format!("{path}: expected a number from 0 to {LARGEST:e}, found {number}"))
        }
        Value::Integer(number) if !(0..=LARGEST as i64).contains(number) => {
            Err(format!("{path}: expected a number from 0 to {LARGEST:e}, found {number}"))
        }
        Value::String(text) if text.len() > LONGEST_TEXT || text.chars().any(char::is_control) => {
            Err(format!("{path}: expected at most {LONGEST_TEXT} bytes of printable text"))
        }
        Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                walk(&format!("{path}[{index}]"), value, sources, depth + 1)?;
            }
            Ok(())
        }
        Value::Table(table) => {
            if let Some(Value::String(source)) = table.get("source")
                && !sources.contains_key(source)
            {
                return Err(format!("{path}.source: \"{source}\" is no entry of sources"));
            }
            if table.contains_key("source") && !nonzero(table.get("value")) {
                return Err(format!("{path}.value: expected a number above 0; leave out what is not known"));
            }
            if let Some(key) = table.keys().find(|key| key.len() > LONGEST_NAME || key.chars().any(char::is_control)) {
                let key: String = key.chars().take(70).collect();
                return Err(format!("{path}: expected keys of at most {LONGEST_NAME} printable bytes, found {key:?}"));
            }
            for (key, value) in table {
                walk(&format!("{path}.{key}"), value, sources, depth + 1)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn nonzero(value: Option<&Value>) -> bool {
    match value {
        Some(Value::Integer(number)) => *number != 0,
        Some(Value::Float(number)) => *number != 0.0,
        // Not every entry with a source is a figure.
        _ => true,
    }
}

fn is_name(key: &str, name: &str) -> Result<(), String> {
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '-';
    if (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(is_inner)
    {
        return Ok(());
    }
    Err(format!("{key}: expected up to 64 lower-case letters, digits, _ and -, a letter first, found {name:?}"))
}

fn is_op(name: &str) -> bool {
    // Codes are dense from 1 on; the first that has no name is one behind the last.
    (1..).map(qwen_hal_abi::ops::op_name).take_while(|known| *known != "unknown").any(|known| known == name)
}

fn power_of_two(value: f64) -> bool {
    value >= 1.0 && value <= f64::from(1_u32 << 30) && value.fract() == 0.0 && (value as u64).is_power_of_two()
}
