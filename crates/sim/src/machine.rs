//! The machine that simulated devices are plugged into: sockets, PCIe switches at each, and below each switch a network interface
//! and devices.
//!
//! In: `sockets` and `switches` of the settings. Out: the PCI address and NUMA node that a device tells, and a folder that tells
//! the rest as Linux does below `/sys` and `/proc` ([`write_machine`]), for whoever reads the topology of a machine there. Devices
//! of a chip are spread evenly, in order; devices of other chips lie beside them. Invariant: an address is of one device alone, and
//! of a PCI domain that no firmware gives.

use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::model::models;
use crate::settings::Settings;

/// PCI domain of the first switch; each has one.
const FIRST_DOMAIN: u64 = 0x7100;
/// Buses below a switch: one for each chip, from here on, and the interface's.
const FIRST_BUS: u64 = 2;
const INTERFACE_BUS: u64 = 0xff;
/// Devices of a bus: 32, of 8 functions each.
const PER_BUS: u64 = 256;
/// What firmware says of nodes: itself, and another socket.
const NEAR_AND_FAR: [u32; 2] = [10, 21];

/// Where a device is plugged in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Address as the HAL has it: domain, bus, device, function in bits 32.., 16.., 8.., 0...
    pub(crate) address: u64,
    /// NUMA node.
    pub(crate) node: u32,
}

/// The place of device `number` of the chip at `chip` of the list; none if no machine is described, or it is full.
pub(crate) fn slot(settings: &Settings, chip: usize, number: u64) -> Option<Slot> {
    let switches = settings.sockets * settings.switches;
    let bus = FIRST_BUS + chip as u64;
    // As many below each switch as are needed for all to have a place.
    let each = settings.devices.div_ceil(switches.max(1));
    let (switch, at) = (number / each, number % each);
    let exists = switch < switches && at < PER_BUS && bus < INTERFACE_BUS;
    exists.then(|| Slot {
        address: ((FIRST_DOMAIN + switch) << 32) | (bus << 16) | ((at / 8) << 8) | (at % 8),
        node: (switch / settings.switches) as u32,
    })
}

/// Writes the machine of these settings (as `QWEN_SIM` has them) into a folder, as Linux tells it: nodes, devices, and an interface
/// `ethN` for switch N that has the network 127.0.(N + 1).0/24, whose addresses every Linux machine has.
///
/// # Errors
/// If the settings are wrong or describe no machine, or the folder is not empty or can't be written.
pub fn write_machine(settings: &str, root: &Path) -> io::Result<()> {
    let wrong = |message: String| io::Error::new(io::ErrorKind::InvalidInput, message);
    let settings = Settings::read(settings, None).map_err(|failure| wrong(failure.message.into_owned()))?;
    let chips = models().map_err(|failure| wrong(failure.message.into_owned()))?.len();
    if settings.sockets == 0 {
        return Err(wrong("the settings describe no machine: expected sockets=N, and switches=N for each".into()));
    }
    if std::fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_some()) {
        let root = root.display();
        let message = format!("expected an empty folder, found files in {root}: empty it, or name another");
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    }
    for node in 0..settings.sockets {
        let folder = root.join(format!("sys/devices/system/node/node{node}"));
        std::fs::create_dir_all(&folder)?;
        let distances: Vec<String> =
            (0..settings.sockets).map(|other| NEAR_AND_FAR[usize::from(other != node)].to_string()).collect();
        std::fs::write(folder.join("distance"), distances.join(" ") + "\n")?;
    }
    let mut routes = String::from("Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n");
    for switch in 0..settings.sockets * settings.switches {
        let node = (switch / settings.switches) as u32;
        let path = plug(root, Slot { address: ((FIRST_DOMAIN + switch) << 32) | (INTERFACE_BUS << 16), node })?;
        let interface = root.join(format!("sys/class/net/eth{switch}"));
        std::fs::create_dir_all(&interface)?;
        symlink(path, interface.join("device"))?;
        // Numbers of this file are the bytes of an address in memory.
        let network = u32::from_le_bytes([127, 0, switch as u8 + 1, 0]);
        routes += &format!("eth{switch}\t{network:08X}\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n");
    }
    for chip in 0..chips {
        for slot in (0..settings.devices).filter_map(|number| slot(&settings, chip, number)) {
            plug(root, slot)?;
        }
    }
    std::fs::create_dir_all(root.join("proc/net"))?;
    std::fs::write(root.join("proc/net/route"), routes)
}

/// Makes the folder of a device below its bridges, with a link where devices are looked up by address.
fn plug(root: &Path, slot: Slot) -> io::Result<std::path::PathBuf> {
    let part = |shift: u32, mask: u64| (slot.address >> shift) & mask;
    let domain = part(32, 0xffff_ffff);
    let name = format!("{domain:04x}:{:02x}:{:02x}.{:x}", part(16, 0xff), part(8, 0xff), part(0, 7));
    let bridges = format!("sys/devices/pci{domain:04x}:00/{domain:04x}:00:01.0/{domain:04x}:01:00.0");
    let path = root.canonicalize()?.join(bridges).join(&name);
    std::fs::create_dir_all(&path)?;
    std::fs::write(path.join("numa_node"), format!("{}\n", slot.node))?;
    let links = root.join("sys/bus/pci/devices");
    std::fs::create_dir_all(&links)?;
    symlink(&path, links.join(name))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn devices_are_spread_in_order_and_have_addresses_of_their_own() {
        let settings = Settings { sockets: 2, switches: 2, devices: 8, ..Settings::default() };
        let slots: Vec<Slot> = (0..8).map(|number| slot(&settings, 3, number).unwrap()).collect();
        let nodes: Vec<u32> = slots.iter().map(|slot| slot.node).collect();
        assert_eq!(nodes, [0, 0, 0, 0, 1, 1, 1, 1]);
        assert_eq!(slots[3].address, 0x7101_0005_0001);
        let of_chip = |chip| (0..8).filter_map(|number| slot(&settings, chip, number)).collect::<Vec<Slot>>();
        let all: HashSet<u64> = (0..20).flat_map(of_chip).map(|slot| slot.address).collect();
        assert_eq!(all.len(), 160);
        // Without a machine nothing is told; of more devices than there is room for, the last have no place.
        assert_eq!(slot(&Settings::default(), 0, 0), None);
        let many = Settings { devices: 1024, sockets: 1, ..Settings::default() };
        assert_eq!((slot(&many, 0, 255).is_some(), slot(&many, 0, 256)), (true, None));
    }

    #[test]
    fn a_machine_is_written_into_an_empty_folder() {
        let folder = tempfile::tempdir().unwrap();
        let write = || write_machine("sockets=1,switches=1,devices=1", &folder.path().join("new"));
        write().unwrap();
        let error = write().unwrap_err().to_string();
        assert!(error.contains("expected an empty folder"), "{error}");
    }
}
