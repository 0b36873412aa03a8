//! Exchange between simulated chips: the modelled time of their links, and faults that reach every rank.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

mod common;

use std::time::{Duration, Instant};

use common::{buffer, open, plugin};
use qwen_hal::abi::ops::{QHAL_DTYPE_F32, QHAL_DTYPE_I8};
use qwen_hal::abi::{QHAL_ABORTED, QHAL_DEADLINE_EXCEEDED, QHAL_DEVICE_LOST, QHAL_INVALID_ARGUMENT};
use qwen_hal::{Collective, Communicator, Device, Exchange, HalError, LaunchError, Reduction, Stream, Support};

const LIMIT: Duration = Duration::from_secs(20);

/// Ranks on handles of one chip, each with its options.
fn team(chip: &str, options: &[&[(&str, &str)]]) -> (Vec<Device>, Vec<Stream>) {
    let plugin = plugin();
    let devices: Vec<Device> =
        options.iter().enumerate().map(|(rank, options)| open(&plugin, chip, rank % 2, options)).collect();
    let streams = devices.iter().map(|device| device.stream("rank").unwrap()).collect();
    (devices, streams)
}

fn sum(count: u64) -> Collective {
    Collective { exchange: Exchange::AllReduce(Reduction::Sum), dtype: QHAL_DTYPE_F32, count }
}

fn code(error: &HalError) -> i32 {
    error.call_error().unwrap().code
}

/// What each rank is told of a sum in which all take part: when it enqueues its part, if the others have failed by then, or by its stream.
fn outcomes(devices: &[Device], streams: &[Stream], comm: &Communicator) -> Vec<i32> {
    let ranks = devices.iter().zip(streams).enumerate();
    let enqueued: Vec<_> = ranks
        .map(|(rank, (device, stream))| {
            let memory = buffer(device, 4096).whole();
            comm.enqueue(rank, stream, &sum(1024), Some(&memory), Some(&memory))
        })
        .collect();
    let told = |(enqueued, stream): (Result<(), LaunchError>, &Stream)| match enqueued {
        Ok(()) => stream.wait_for(LIMIT).map_or_else(|error| code(&error), |done| -i32::from(!done)),
        Err(error) => error.call_error().unwrap().code,
    };
    enqueued.into_iter().zip(streams).map(told).collect()
}

fn ns(comm: &Communicator, collective: &Collective) -> f64 {
    match comm.supports(collective).unwrap() {
        Support::Native(estimate) => estimate.ns.unwrap_or(0.0),
        other => panic!("{other:?}"),
    }
}

#[test]
fn modelled_time_is_that_of_the_link() {
    let (devices, _) = team("ascend910b", &[&[], &[]]);
    let link = devices[0].link(devices[1].info()).unwrap();
    let (bandwidth, latency) = (link.bandwidth.unwrap(), link.latency_ns.unwrap_or(0.0));
    let comm = Communicator::new(&devices, None).unwrap();
    let bytes = 1e9;
    let collective = |exchange| Collective { exchange, dtype: QHAL_DTYPE_F32, count: (bytes / 4.0) as u64 };
    // Two ranks: a half there and back at a time.
    let expected = 2.0 * (latency + bytes / 2.0 / bandwidth * 1e9);
    let found = ns(&comm, &collective(Exchange::AllReduce(Reduction::Sum)));
    assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    let found = ns(&comm, &collective(Exchange::Send { to: 1 }));
    assert!((found / (latency + bytes / bandwidth * 1e9) - 1.0).abs() < 1e-9);
    let (slow, _) = team("ascend910b", &[&[], &[("slow_link", "10")]]);
    let slow = Communicator::new(&slow, None).unwrap();
    let ratio = ns(&slow, &collective(Exchange::AllGather)) / ns(&comm, &collective(Exchange::AllGather));
    assert!((9.0..=10.0).contains(&ratio), "{ratio}");
}

#[test]
fn the_clock_counts_the_exchange() {
    let busy = |options: &[(&str, &str)]| {
        let (devices, streams) = team("gcu-s60", &[options, options]);
        let comm = Communicator::new(&devices, None).unwrap();
        let start = Instant::now();
        for (rank, (device, stream)) in devices.iter().zip(&streams).enumerate() {
            let memory = buffer(device, 4 << 20).whole();
            comm.enqueue(rank, stream, &sum(1 << 20), Some(&memory), Some(&memory)).unwrap();
        }
        streams.iter().for_each(|stream| stream.wait().unwrap());
        devices[0].health().unwrap().utilisation.unwrap() * start.elapsed().as_secs_f64()
    };
    let (usual, slow) = (busy(&[]), busy(&[("slow_link", "100")]));
    assert!(usual > 0.0 && slow > 10.0 * usual, "{usual} {slow}");
}

#[test]
fn a_device_lost_in_a_collective_is_an_error_for_every_rank() {
    for lost in 0..4 {
        let options: Vec<&[(&str, &str)]> =
            (0..4).map(|rank| if rank == lost { &[("lost", "1")][..] } else { &[] }).collect();
        let (devices, streams) = team("mlu370", &options);
        let comm = Communicator::new(&devices, Some(LIMIT)).unwrap();
        let mut expected = vec![QHAL_ABORTED; 4];
        expected[lost] = QHAL_DEVICE_LOST;
        assert_eq!(outcomes(&devices, &streams, &comm), expected, "rank {lost} is lost");
        // Nor do later ones hang.
        let later = devices[(lost + 1) % 4].stream("later").unwrap();
        let memory = buffer(&devices[(lost + 1) % 4], 4096).whole();
        assert!(comm.enqueue((lost + 1) % 4, &later, &sum(1024), Some(&memory), Some(&memory)).is_err());
    }
}

#[test]
fn a_device_that_is_lost_before_its_part_is_noticed_by_those_who_wait() {
    let (devices, streams) = team("bi-v100", &[&[], &[("lost", "1")]]);
    let comm = Communicator::new(&devices, Some(LIMIT)).unwrap();
    let memory = buffer(&devices[0], 4096).whole();
    comm.enqueue(0, &streams[0], &sum(1024), Some(&memory), Some(&memory)).unwrap();
    // Another communicator's collective loses the device; nothing of the first was enqueued for it.
    let other = Communicator::new(&devices[1..], None).unwrap();
    let own = buffer(&devices[1], 4096).whole();
    other.enqueue(0, &streams[1], &sum(1024), Some(&own), Some(&own)).unwrap();
    assert_eq!(code(&streams[1].wait().unwrap_err()), QHAL_DEVICE_LOST);
    let error = streams[0].wait().unwrap_err();
    assert_eq!(code(&error), QHAL_ABORTED);
    assert!(error.to_string().contains("rank 1 left the collective: its device is lost"), "{error}");
}

#[test]
fn a_rank_that_hangs_or_does_not_come_is_waited_for_as_long_as_was_said() {
    let (devices, streams) = team("br100", &[&[], &[("hang", "1"), ("watchdog_ms", "100")]]);
    let comm = Communicator::new(&devices, Some(LIMIT)).unwrap();
    assert_eq!(outcomes(&devices, &streams, &comm), [QHAL_ABORTED, QHAL_DEADLINE_EXCEEDED]);
    let (devices, streams) = team("br100", &[&[], &[], &[]]);
    let comm = Communicator::new(&devices, Some(Duration::from_millis(50))).unwrap();
    let memory = buffer(&devices[1], 4096).whole();
    comm.enqueue(1, &streams[1], &sum(1024), Some(&memory), Some(&memory)).unwrap();
    let error = streams[1].wait().unwrap_err();
    assert_eq!(code(&error), QHAL_DEADLINE_EXCEEDED);
    assert!(error.to_string().contains("waited 50 ms for ranks [0, 2]"), "{error}");
}

#[test]
fn chips_of_different_kinds_and_one_device_twice_are_not_joined() {
    let plugin = plugin();
    let [a, other] = [open(&plugin, "ascend910b", 0, &[]), open(&plugin, "mlu370", 0, &[])];
    let refused = |devices: &[Device]| Communicator::new(devices, None).unwrap_err().to_string();
    assert!(refused(&[a.clone(), other]).contains("have no fabric"));
    assert!(refused(&[a.clone(), a]).contains("a rank already"));
}

#[test]
fn what_cannot_be_summed_can_be_moved() {
    let (devices, _) = team("mlu370", &[&[], &[]]);
    let comm = Communicator::new(&devices, None).unwrap();
    let supported = |exchange, dtype| comm.supports(&Collective { exchange, dtype, count: 16 }).unwrap().is_supported();
    assert!(!supported(Exchange::AllReduce(Reduction::Sum), QHAL_DTYPE_I8));
    assert!(supported(Exchange::AllGather, QHAL_DTYPE_I8));
}

#[test]
fn parts_that_do_not_fit_are_told_to_all_in_words() {
    let (devices, streams) = team("dcu-z100", &[&[], &[]]);
    let comm = Communicator::new(&devices, None).unwrap();
    for (rank, count) in [(0, 1024), (1, 512)] {
        let memory = buffer(&devices[rank], 4 * count).whole();
        comm.enqueue(rank, &streams[rank], &sum(count), Some(&memory), Some(&memory)).unwrap();
    }
    for stream in &streams {
        let error = stream.wait().unwrap_err();
        assert_eq!(code(&error), QHAL_INVALID_ARGUMENT);
        let words = "rank 0: all_reduce of 1024 elements of type 0, peer 0; rank 1: all_reduce of 512";
        assert!(error.to_string().contains(words), "{error}");
    }
}
