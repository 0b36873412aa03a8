//! Names, types and shapes of a checkpoint's tensors: all that building a graph needs of them.

use std::collections::BTreeMap;

use qwen_formats::{Checkpoint, DType};

/// Type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Storage type.
    pub dtype: DType,
    /// Row-major, outermost first.
    pub shape: Vec<u64>,
}

/// The tensors of a checkpoint by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorIndex {
    specs: BTreeMap<String, TensorSpec>,
}

impl TensorIndex {
    /// The tensor of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorSpec> {
        self.specs.get(name)
    }
    /// Whether there is a tensor of a name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.specs.contains_key(name)
    }
    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: impl Into<String>, dtype: DType, shape: Vec<u64>) {
        self.specs.insert(name.into(), TensorSpec { dtype, shape });
    }
    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) -> Option<TensorSpec> {
        self.specs.remove(name)
    }
    /// All tensors, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorSpec)> {
        self.specs.iter().map(|(name, spec)| (name.as_str(), spec))
    }
    /// Number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.specs.len()
    }
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }
}

impl From<&Checkpoint> for TensorIndex {
    fn from(checkpoint: &Checkpoint) -> Self {
        let specs = checkpoint
            .declared()
            .map(|(name, dtype, shape)| (name.to_owned(), TensorSpec { dtype, shape: shape.to_vec() }))
            .collect();
        Self { specs }
    }
}
