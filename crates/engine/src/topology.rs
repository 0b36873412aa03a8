//! How far devices are from the network interfaces that requests come in on: by PCIe and NUMA, as Linux tells it below `/sys`.
//!
//! In: a root folder (`/`, or a captured one). Out: the [`Distance`] between a place and a place. A PCI device's real path
//! names the bridges above it; two devices below one bridge reach each other without the host's memory. What is not known is
//! [`Distance::Unknown`], which is the same for all, so that load decides.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Where something is plugged in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Place {
    /// PCI addresses from the root complex down, such as `pci0000:00`, `0000:00:01.0`; empty if it is not known.
    pub bus: Vec<String>,
    /// NUMA node.
    pub node: Option<u32>,
}

/// From near to far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Below one PCIe switch.
    SameSwitch,
    /// Below one root complex.
    SameRoot,
    /// On one NUMA node.
    SameNode,
    /// On two nodes, so far apart as the firmware says (10 is one node itself).
    OtherNode(u32),
    /// Nothing is known of one of them.
    Unknown,
}

impl Distance {
    /// Kinds of distances, from near to far.
    pub const NAMES: [&'static str; 5] = ["same_switch", "same_root", "same_node", "other_node", "unknown"];

    /// Which of [`Distance::NAMES`] it is.
    #[must_use]
    pub const fn kind(self) -> usize {
        match self {
            Self::SameSwitch => 0,
            Self::SameRoot => 1,
            Self::SameNode => 2,
            Self::OtherNode(_) => 3,
            Self::Unknown => 4,
        }
    }
}

/// Distance of nodes where the firmware says nothing: what it says for two sockets as a rule.
const USUAL_NODE_DISTANCE: u32 = 21;
/// Local addresses that are remembered.
const MOST_ADDRESSES: usize = 256;

/// What a machine says of its buses, nodes and interfaces.
#[derive(Debug)]
pub struct Topology {
    root: PathBuf,
    /// Distances between nodes, as far as they are told.
    nodes: HashMap<u32, Vec<u32>>,
    /// Places of interfaces by local address.
    known: Mutex<HashMap<IpAddr, Place>>,
}

impl Topology {
    /// Of the machine whose `/sys` and `/proc` are below `root`. What can't be read is unknown.
    #[must_use]
    pub fn read(root: &Path) -> Self {
        let folder = root.join("sys/devices/system/node");
        let number = |name: &str| name.strip_prefix("node")?.parse::<u32>().ok();
        let mut nodes = HashMap::new();
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Some(node) = entry.file_name().to_str().and_then(number) else { continue };
            let text = std::fs::read_to_string(entry.path().join("distance")).unwrap_or_default();
            nodes.insert(node, text.split_whitespace().filter_map(|word| word.parse().ok()).collect());
        }
        Self { root: root.to_owned(), nodes, known: Mutex::default() }
    }

    /// Of a PCI device, by an address as the HAL has it: domain, bus, device, function in bits 32.., 16.., 8.., 0...
    #[must_use]
    pub fn of_bus_address(&self, address: u64) -> Place {
        let part = |shift: u32, mask: u64| (address >> shift) & mask;
        let name =
            format!("{:04x}:{:02x}:{:02x}.{:x}", part(32, 0xffff_ffff), part(16, 0xff), part(8, 0xff), part(0, 0x7));
        self.of_device(&self.root.join("sys/bus/pci/devices").join(name))
    }

    /// Of the interface that has this address.
    #[must_use]
    pub fn of_local_address(&self, address: IpAddr) -> Place {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = known.get(&address) {
            return place.clone();
        }
        let place = self.interface(address).map_or_else(Place::default, |name| self.of_interface(&name));
        if known.len() < MOST_ADDRESSES {
            known.insert(address, place.clone());
        }
        place
    }

    /// Of an interface by name.
    #[must_use]
    pub fn of_interface(&self, name: &str) -> Place {
        self.of_device(&self.root.join("sys/class/net").join(name).join("device"))
    }

    fn of_device(&self, link: &Path) -> Place {
        let Ok(real) = std::fs::canonicalize(link) else { return Place::default() };
        // -1 where the firmware does not say.
        let node = std::fs::read_to_string(real.join("numa_node")).ok().and_then(|text| text.trim().parse().ok());
        let names = real.components().filter_map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        });
        let bus: Vec<String> = names.skip_while(|name| !name.starts_with("pci")).map(str::to_owned).collect();
        Place { bus, node }
    }

    /// The interface that has a local address: IPv6 addresses are listed, of IPv4 the networks that are reached without a gateway.
    fn interface(&self, address: IpAddr) -> Option<String> {
        let read = |name: &str| std::fs::read_to_string(self.root.join("proc/net").join(name)).ok();
        match address {
            IpAddr::V6(address) => match address.to_ipv4_mapped() {
                Some(address) => route_to(&read("route")?, address),
                None => listed(&read("if_inet6")?, address),
            },
            IpAddr::V4(address) => route_to(&read("route")?, address),
        }
    }

    /// From one place to another.
    #[must_use]
    pub fn distance(&self, a: &Place, b: &Place) -> Distance {
        let shared = a.bus.iter().zip(&b.bus).take_while(|(a, b)| a == b).count();
        match (shared, a.node, b.node) {
            // The root complex, and a bridge or more.
            (2.., ..) => Distance::SameSwitch,
            (1, ..) => Distance::SameRoot,
            (_, Some(a), Some(b)) if a == b => Distance::SameNode,
            (_, Some(a), Some(b)) => {
                let told = self.nodes.get(&a).and_then(|distances| distances.get(b as usize));
                Distance::OtherNode(told.copied().unwrap_or(USUAL_NODE_DISTANCE))
            }
            _ => Distance::Unknown,
        }
    }
}

/// The interface of the narrowest network of `/proc/net/route` that an address is in.
fn route_to(table: &str, address: Ipv4Addr) -> Option<String> {
    // Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask; numbers are the bytes of the address in memory.
    let number = |word: Option<&str>| u32::from_str_radix(word?, 16).ok().map(u32::from_be);
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let (network, gateway) = (number(words.next())?, number(words.next())?);
        let mask = number(words.nth(4))?;
        (gateway == 0 && u32::from(address) & mask == network && mask != 0).then_some((mask.count_ones(), name))
    };
    table.lines().skip(1).filter_map(row).max_by_key(|(bits, _)| *bits).map(|(_, name)| name)
}

/// The interface that `/proc/net/if_inet6` lists an address for.
fn listed(table: &str, address: Ipv6Addr) -> Option<String> {
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let known = u128::from_str_radix(words.next()?, 16).ok()?;
        (known == u128::from(address)).then(|| words.last().map(str::to_owned)).flatten()
    };
    table.lines().find_map(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
        eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
        eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
        eth1\t0001010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";

    #[test]
    fn addresses_belong_to_interfaces() {
        assert_eq!(route_to(ROUTE, [10, 0, 0, 7].into()).as_deref(), Some("eth0"));
        assert_eq!(route_to(ROUTE, [10, 1, 1, 7].into()).as_deref(), Some("eth1"));
        assert_eq!(route_to(ROUTE, [192, 168, 0, 1].into()), None);
        assert_eq!(route_to("", [10, 0, 0, 7].into()), None);
        let table = "fe80000000000000021122fffe334455 02 40 20 80     eth3\n";
        assert_eq!(listed(table, "fe80::211:22ff:fe33:4455".parse().unwrap()).as_deref(), Some("eth3"));
        assert_eq!(listed(table, "::1".parse().unwrap()), None);
    }

    #[test]
    fn nearer_is_less() {
        let topology = Topology { root: PathBuf::new(), nodes: HashMap::new(), known: Mutex::default() };
        let place = |bus: &[&str], node| Place { bus: bus.iter().map(|name| (*name).to_owned()).collect(), node };
        let nic = place(&["pci0000:00", "0000:00:01.0", "0000:01:00.0"], Some(0));
        let ladder = [
            place(&["pci0000:00", "0000:00:01.0", "0000:02:00.0"], Some(0)),
            place(&["pci0000:00", "0000:00:02.0", "0000:03:00.0"], Some(0)),
            place(&["pci0000:40", "0000:40:01.0", "0000:41:00.0"], Some(0)),
            place(&["pci0000:80", "0000:80:01.0", "0000:81:00.0"], Some(1)),
            Place::default(),
        ];
        let found: Vec<Distance> = ladder.iter().map(|other| topology.distance(&nic, other)).collect();
        let expected = [
            Distance::SameSwitch,
            Distance::SameRoot,
            Distance::SameNode,
            Distance::OtherNode(USUAL_NODE_DISTANCE),
            Distance::Unknown,
        ];
        assert_eq!(found, expected);
        assert!(found.is_sorted());
        assert_eq!(found.iter().map(|distance| distance.kind()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }
}
