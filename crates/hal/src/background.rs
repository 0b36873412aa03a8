//! Threads that work beside those that compute.

/// By how much their niceness is higher: they get a quarter of a processor that a compute thread wants too (Linux weights 335
/// and 1024 at 5 and 0; `sched_prio_to_weight` in kernel/sched/core.c), and all of one that is idle.
#[cfg(target_os = "linux")]
const NICE: i32 = 5;

/// Makes the calling thread give way, from now on, to threads that compute where both want the same processor: for work that may
/// take its time. Threads that it starts inherit that. Does nothing where the system has no such thing for a thread.
pub fn work_in_background() {
    #[cfg(target_os = "linux")]
    // SAFETY: on Linux, 0 names the calling thread, and nothing but its scheduling is asked for or changed.
    unsafe {
        let niceness = libc::getpriority(libc::PRIO_PROCESS, 0);
        // It is never lowered: a process that is nice already stays so. A refusal does not matter.
        libc::setpriority(libc::PRIO_PROCESS, 0, (niceness + NICE).min(19));
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_calling_thread_alone_becomes_nicer() {
        // SAFETY: asks for the niceness of the calling thread.
        let niceness = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = niceness();
        let inside = std::thread::spawn(move || {
            work_in_background();
            let inherited = std::thread::spawn(niceness).join();
            (niceness(), inherited)
        });
        let (own, inherited) = inside.join().unwrap();
        let expected = (before + NICE).min(19);
        assert_eq!((own, inherited.unwrap(), niceness()), (expected, expected, before));
    }
}
