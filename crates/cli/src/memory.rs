//! What the process has used.

/// Most memory that was resident at a time, where the system tells.
#[must_use]
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Forgets the peak, so that [`peak_resident_bytes`] tells of what comes after. Returns whether the system does that.
#[must_use]
pub fn reset_peak() -> bool {
    // 5 is the peak's number in proc(5).
    std::fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Memory that new work may take, where the system tells.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory() {
        let peak = peak_resident_bytes().unwrap();
        assert!(peak > 1 << 19, "{peak}");
        assert!(available_bytes().unwrap() > 0);
    }
}
