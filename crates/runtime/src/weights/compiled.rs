//! Weights of a compiled file: used where they are mapped, if they are what the plan asks for.

use std::sync::Arc;

use qwen_formats::FormatError;
use qwen_formats::gguf::PackedWeight;
use qwen_hal::{Device, Slice, Stream};

use super::{MappedRange, WeightKey, WeightStore, to_device};
use crate::RuntimeError;

impl WeightStore {
    /// The packed form that a compiled file holds; `None` if there is none but the weight can be packed from what is stored.
    ///
    /// # Errors
    /// If neither is there, or it is not what the graph and the plan say.
    pub(super) fn compiled(
        &self,
        device: &Device,
        stream: &Stream,
        key: WeightKey,
        layout: u32,
        bytes: u64,
    ) -> Result<Option<Slice>, RuntimeError> {
        let Some(packed) = self.checkpoint.packed() else { return Ok(None) };
        let (decl, source) = self.source(key)?;
        let same_backend = packed.backend() == device.plugin().name();
        let form = packed.forms(&decl.name, key.1).find(|form| same_backend && form.layout == layout);
        let Some(form) = form else {
            let stored = source.tensors.iter().all(|name| self.checkpoint.info(name).is_some());
            if stored {
                return Ok(None);
            }
            return Err(self.no_form(device, key, &format!("form {layout:#x}")));
        };
        if form.dtype != source.dtype || form.shape != decl.shape || form.bytes != bytes {
            let found = format!("{} bytes made of {} {:?}", form.bytes, form.dtype, form.shape);
            return Err(self.damaged(key, format!("{bytes} bytes made of {} {:?}", source.dtype, decl.shape), found));
        }
        let range = self.packed_range(form).ok_or_else(|| {
            let found = format!("one of {} bytes", self.checkpoint.file_bytes());
            self.damaged(key, format!("{bytes} bytes from {} of the file", form.offset), found)
        })?;
        to_device(device, stream, Arc::new(range), decl.name.clone()).map(Some)
    }

    /// Refuses a weight whose tensors the compiled file holds in another form only.
    pub(super) fn check_present(&self, device: &Device, key: WeightKey) -> Result<(), RuntimeError> {
        let Some(packed) = self.checkpoint.packed() else { return Ok(()) };
        let (_, source) = self.source(key)?;
        if source.tensors.iter().any(|name| packed.absent_tensor(name).is_some()) {
            return Err(self.no_form(device, key, "it as the model's file stores it"));
        }
        Ok(())
    }

    fn packed_range(&self, form: &PackedWeight) -> Option<MappedRange> {
        let mapping = self.checkpoint.mapping(0)?;
        let start = usize::try_from(form.offset).ok()?;
        let range = start..start.checked_add(usize::try_from(form.bytes).ok()?)?;
        mapping.get(range.clone())?;
        Some(MappedRange { mapping, range })
    }

    fn damaged(&self, key: WeightKey, expected: String, found: String) -> RuntimeError {
        let (path, what) = (self.checkpoint.path().to_owned(), format!("weight {}", self.place(key)));
        RuntimeError::Format(FormatError::Packed { path, what, expected, found })
    }

    fn no_form(&self, device: &Device, key: WeightKey, wanted: &str) -> RuntimeError {
        let made_for = self.checkpoint.packed().map_or_else(String::new, |packed| {
            let forms = packed.forms(self.name(key), key.1).map(|form| format!("{:#x}", form.layout));
            let forms: Vec<String> = forms.collect();
            let forms = if forms.is_empty() { "no form of it".into() } else { format!("form {}", forms.join(", ")) };
            format!("{} with {forms}", packed.backend())
        });
        let (name, device) = (self.place(key), device.plugin().name().to_owned());
        RuntimeError::Form { name, made_for, device, wanted: wanted.to_owned() }
    }

    /// Name of a weight with its layer.
    fn place(&self, key: WeightKey) -> String {
        let first = self.decls.get(key.0.index()).and_then(|decl| decl.first_layer);
        match first {
            Some(first) => format!("{} of layer {}", self.name(key), first.saturating_add(key.1)),
            None => self.name(key).to_owned(),
        }
    }
}
