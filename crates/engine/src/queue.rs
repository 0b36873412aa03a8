//! Requests that wait, and whose turn it is.
//!
//! Order: lower priority values first; of equal ones, the client that was served least; of one client's, the earliest
//! arrival. Service is counted in tokens: those computed for a client, prompts and answers alike, so a client that sends long
//! prompts gets fewer of them through than one that sends short ones. A client without requests is forgotten; one that comes
//! (back) starts at the least service of those that are there, so neither idling nor flooding earns anything. Invariant:
//! between two clients that always have something waiting, the difference of service stays below what one request can come
//! to.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::ClientKey;

/// What the queue needs to know of what it holds.
pub(crate) trait Waiting {
    fn priority(&self) -> i32;
    fn client(&self) -> ClientKey;
    /// Rises with arrival; a request that was preempted keeps its own.
    fn arrival(&self) -> u64;
}

impl<T: Waiting> Waiting for Box<T> {
    fn priority(&self) -> i32 {
        (**self).priority()
    }
    fn client(&self) -> ClientKey {
        (**self).client()
    }
    fn arrival(&self) -> u64 {
        (**self).arrival()
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Account {
    served: u64,
    /// Requests waiting or running.
    requests: usize,
}

/// Waiting requests by priority and client.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    lines: BTreeMap<(i32, ClientKey), VecDeque<T>>,
    accounts: HashMap<ClientKey, Account>,
    len: usize,
}

impl<T: Waiting> Queue<T> {
    pub(crate) fn new() -> Self {
        Self { lines: BTreeMap::new(), accounts: HashMap::new(), len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// A request of this client arrived.
    pub(crate) fn open(&mut self, client: ClientKey) {
        let least = self.accounts.values().map(|account| account.served).min().unwrap_or(0);
        let account = self.accounts.entry(client).or_insert(Account { served: least, requests: 0 });
        account.requests += 1;
    }

    /// A request of this client ended.
    pub(crate) fn close(&mut self, client: ClientKey) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.requests -= 1;
            if account.requests == 0 {
                self.accounts.remove(&client);
            }
        }
    }

    /// So many tokens were computed for this client.
    pub(crate) fn charge(&mut self, client: ClientKey, tokens: u64) {
        if let Some(account) = self.accounts.get_mut(&client) {
            account.served += tokens;
        }
    }

    /// Tokens computed for this client, comparable with others'.
    pub(crate) fn served(&self, client: ClientKey) -> u64 {
        self.accounts.get(&client).map_or(0, |account| account.served)
    }

    /// Puts a request where its arrival belongs among those of its priority and client.
    pub(crate) fn push(&mut self, item: T) {
        let line = self.lines.entry((item.priority(), item.client())).or_default();
        let at = line.partition_point(|other| other.arrival() < item.arrival());
        line.insert(at, item);
        self.len += 1;
    }

    fn first_line(&self) -> Option<(i32, ClientKey)> {
        let best = self.lines.keys().next()?.0;
        let equal = self.lines.range((best, ClientKey(0))..=(best, ClientKey(u64::MAX)));
        let turn = |(key, line): &(&(i32, ClientKey), &VecDeque<T>)| {
            (self.served(key.1), line.front().map_or(u64::MAX, Waiting::arrival))
        };
        equal.min_by_key(turn).map(|(key, _)| *key)
    }

    /// Whose turn it is.
    pub(crate) fn peek(&self) -> Option<&T> {
        self.lines.get(&self.first_line()?)?.front()
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        let key = self.first_line()?;
        let line = self.lines.get_mut(&key)?;
        let item = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&key);
        }
        self.len -= usize::from(item.is_some());
        item
    }

    pub(crate) fn any(&self, condition: impl FnMut(&T) -> bool) -> bool {
        self.lines.values().flatten().any(condition)
    }

    pub(crate) fn each(&self, visit: impl FnMut(&T)) {
        self.lines.values().flatten().for_each(visit);
    }

    /// Takes out what fulfils a condition.
    pub(crate) fn take_if(&mut self, mut condition: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut taken = Vec::new();
        for line in self.lines.values_mut() {
            if line.iter().any(&mut condition) {
                let (out, kept): (VecDeque<T>, VecDeque<T>) =
                    std::mem::take(line).into_iter().partition(&mut condition);
                *line = kept;
                taken.extend(out);
            }
        }
        self.lines.retain(|_, line| !line.is_empty());
        self.len -= taken.len();
        taken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Item(i32, u64, u64);

    impl Waiting for Item {
        fn priority(&self) -> i32 {
            self.0
        }
        fn client(&self) -> ClientKey {
            ClientKey(self.1)
        }
        fn arrival(&self) -> u64 {
            self.2
        }
    }

    fn queue(items: &[Item]) -> Queue<Item> {
        let mut queue = Queue::new();
        for item in items {
            queue.open(item.client());
            queue.push(item.clone());
        }
        queue
    }

    #[test]
    fn priority_then_service_then_arrival() {
        let mut queue = queue(&[Item(1, 1, 1), Item(0, 1, 2), Item(0, 2, 3), Item(0, 1, 4), Item(-5, 3, 5)]);
        queue.charge(ClientKey(1), 10);
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|item| item.2).collect();
        assert_eq!(order, [5, 3, 2, 4, 1]);
    }

    #[test]
    fn what_was_preempted_keeps_its_place() {
        let mut queue = queue(&[Item(0, 1, 1), Item(0, 1, 2)]);
        let first = queue.pop().unwrap();
        queue.push(Item(0, 1, 3));
        queue.push(first);
        assert_eq!(queue.peek(), Some(&Item(0, 1, 1)));
        assert_eq!(queue.take_if(|item| item.2 != 2).len(), 2);
        assert_eq!((queue.len(), queue.pop(), queue.pop()), (1, Some(Item(0, 1, 2)), None));
    }

    #[test]
    fn a_newcomer_is_neither_punished_nor_preferred() {
        let mut queue = queue(&[Item(0, 1, 1), Item(0, 2, 2)]);
        queue.charge(ClientKey(1), 100);
        queue.charge(ClientKey(2), 70);
        queue.open(ClientKey(3));
        assert_eq!(queue.served(ClientKey(3)), 70);
        queue.close(ClientKey(2));
        queue.open(ClientKey(2));
        assert_eq!(queue.served(ClientKey(2)), 70);
    }

    proptest! {
        /// Clients that always wait get the same service, whatever the sizes of their requests and however many they send.
        #[test]
        fn service_is_fair(
            sizes in proptest::collection::vec(1u64..50, 2..5),
            floods in proptest::collection::vec(1usize..20, 5),
        ) {
            let mut queue = Queue::new();
            let mut arrival = 0;
            for (client, flood) in (0..sizes.len()).zip(floods) {
                for _ in 0..flood {
                    arrival += 1;
                    queue.open(ClientKey(client as u64));
                    queue.push(Item(0, client as u64, arrival));
                }
            }
            for _ in 0..400 {
                let item = queue.pop().unwrap();
                queue.charge(item.client(), sizes[item.1 as usize]);
                arrival += 1;
                queue.push(Item(0, item.1, arrival));
            }
            let served: Vec<u64> = (0..sizes.len()).map(|client| queue.served(ClientKey(client as u64))).collect();
            let (low, high) = (served.iter().min().unwrap(), served.iter().max().unwrap());
            prop_assert!(high - low <= *sizes.iter().max().unwrap(), "{:?}", served);
        }
    }
}
