//! Compiling a model: every weight in the forms that a device's plans ask for, written as one file.
//!
//! Which forms are wanted is asked of the device: the model is planned for every precision and every form of latent attention,
//! without loading it. So the file serves whatever options it is opened with. Weights are packed one after the other: memory
//! holds one of them at a time. The same source, device and program give the same bytes.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{self, Write};
use std::sync::Arc;

use qwen_formats::gguf::{
    AbsentTensor, GgufWriter, PACKED_ALIGNMENT, Packed, PackedWeight, TensorPlan, packed_tensor_name,
};
use qwen_formats::{Checkpoint, DType};
use qwen_hal::abi::QHAL_USAGE_WEIGHT;
use qwen_hal::{BufferDesc, Device, Plan, Scope};
use qwen_ir::passes::Policy;
use qwen_ir::{Graph, MlaForm};

use super::{Model, ModelOptions, has_latent_attention};
use crate::RuntimeError;
use crate::describe::weights_of;
use crate::executor::plans_of;
use crate::placement::MAIN;
use crate::weights::WeightKey;

/// What a compiled file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Compiled {
    /// Packed weights.
    pub packed: usize,
    /// Bytes of them.
    pub packed_bytes: u64,
    /// Tensors as in the source.
    pub stored: usize,
    /// Bytes of them.
    pub stored_bytes: u64,
}

/// A packed form that a plan wants.
struct Form {
    key: WeightKey,
    plan: Arc<Plan>,
    input: usize,
    layout: u32,
    bytes: u64,
}

/// What plans want, in the order of execution, each once.
#[derive(Default)]
struct Wanted {
    forms: Vec<Form>,
    stored: Vec<WeightKey>,
    seen: HashSet<(WeightKey, u32)>,
    seen_stored: HashSet<WeightKey>,
}

impl Wanted {
    fn add(&mut self, key: WeightKey, plan: &Arc<Plan>, input: usize) {
        let info = plan.info();
        match (info.packed_bytes.get(input), info.packed_layout.get(input)) {
            (Some(bytes), Some(layout)) if *bytes > 0 => {
                if self.seen.insert((key, *layout)) {
                    let (layout, bytes) = (*layout, *bytes);
                    self.forms.push(Form { key, plan: Arc::clone(plan), input, layout, bytes });
                }
            }
            _ => {
                if self.seen_stored.insert(key) {
                    self.stored.push(key);
                }
            }
        }
    }
}

impl Model {
    /// Writes a model with its weights as the device wants them; `progress` is told of bytes written and in all.
    ///
    /// # Errors
    /// If the source is no GGUF file or compiled already, a weight does not fit, or the output can't be written.
    pub fn write_compiled(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        device: Device,
        options: ModelOptions,
        out: &mut dyn Write,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Compiled, RuntimeError> {
        let refuse =
            |found, help| Err(RuntimeError::Source { path: checkpoint.path().display().to_string(), found, help });
        let Some(metadata) = checkpoint.metadata() else {
            return refuse(
                "safetensors",
                "convert the model to a quantised GGUF file first: other weights are used as they are",
            );
        };
        if checkpoint.packed().is_some() {
            return refuse("a compiled file", "compile the file that it was made of");
        }
        let latent = has_latent_attention(&graph);
        let mut model = Self::unprepared(graph, checkpoint, &device.into(), options)?;
        let wanted = model.wanted(latent)?;
        let stored = model.stored_tensors(checkpoint, &wanted)?;
        let packed = model.description(checkpoint, &wanted, &stored)?;
        let mut writer = GgufWriter::aligned(PACKED_ALIGNMENT);
        packed.put(&mut writer, metadata);
        let mut forms = BTreeMap::new();
        for (index, form) in wanted.forms.iter().enumerate() {
            let name = packed_tensor_name(index);
            if checkpoint.info(&name).is_some() || !writer.tensor(&name, DType::I8, &[form.bytes]) {
                return Err(RuntimeError::Weight { name, expected: "no such tensor".into(), found: "one".into() });
            }
            forms.insert(name, form);
        }
        for name in &stored {
            let info = checkpoint.info(name).filter(|info| writer.tensor(name, info.dtype, &info.shape));
            let expected = || "a tensor that a GGUF file can hold".to_owned();
            info.ok_or_else(|| RuntimeError::Weight {
                name: name.clone(),
                expected: expected(),
                found: "none".into(),
            })?;
        }
        let bytes = |tensors: &[TensorPlan]| tensors.iter().map(|tensor| tensor.bytes).sum();
        let (packed_tensors, stored_tensors) = writer.tensors().split_at(forms.len());
        let report = Compiled {
            packed: packed_tensors.len(),
            packed_bytes: bytes(packed_tensors),
            stored: stored_tensors.len(),
            stored_bytes: bytes(stored_tensors),
        };
        let total = report.packed_bytes + report.stored_bytes;
        let (mut done, mut failed) = (0, None);
        let written = writer.write(out, &mut |tensor, out| {
            match forms.get(&tensor.name) {
                Some(form) => match model.packed_bytes_of(form) {
                    Ok(bytes) => out.write_all(&bytes)?,
                    Err(error) => {
                        failed = Some(error);
                        return Err(io::Error::other("a weight can't be packed"));
                    }
                },
                None => {
                    out.write_all(checkpoint.tensor(&tensor.name).map(|view| view.data).unwrap_or_default())?;
                    if let Some(info) = checkpoint.info(&tensor.name) {
                        checkpoint.release(info);
                    }
                }
            }
            done += tensor.bytes;
            progress(done, total);
            Ok(())
        });
        match (failed, written) {
            (Some(error), _) => Err(error),
            (None, written) => Ok(written.map(|()| report)?),
        }
    }

    /// What the plans of all options want; those of the default come first, so that the file is in their order.
    fn wanted(&mut self, latent: bool) -> Result<Wanted, RuntimeError> {
        let mut wanted = Wanted::default();
        let latent_forms: &[Option<MlaForm>] =
            if latent { &[None, Some(MlaForm::Expanded), Some(MlaForm::Absorbed)] } else { &[None] };
        for policy in [Policy::Balanced, Policy::Fast, Policy::Exact] {
            for form in latent_forms {
                (self.options.policy, self.options.mla_form) = (policy, *form);
                self.phase_matters = latent && form.is_none();
                for step in self.programs()? {
                    let all: Vec<usize> = (0..step.2.program.instructions.len()).collect();
                    // Tables of rows are kept as stored, for a device that has no product with them.
                    plans_of(&step, self.device(), &all, &[], &mut |instruction, plan| {
                        weights_of(instruction).for_each(|(key, input)| wanted.add(key, plan, input));
                        Ok(())
                    })?;
                }
            }
        }
        Ok(wanted)
    }

    /// Tensors that stay as they are: those behind weights that are taken as stored, in that order, then vectors that no plan
    /// reads, because the config is read from some of them. Matrices that nothing reads are left out.
    fn stored_tensors(&self, checkpoint: &Checkpoint, wanted: &Wanted) -> Result<Vec<String>, RuntimeError> {
        let mut seen = BTreeSet::new();
        let mut names = Vec::new();
        for key in &wanted.stored {
            let (_, source) = self.ranks[0].sides[MAIN].weights.source(*key)?;
            names.extend(source.tensors.iter().filter(|name| seen.insert((*name).clone())).cloned());
        }
        for form in &wanted.forms {
            seen.extend(self.ranks[0].sides[MAIN].weights.source(form.key)?.1.tensors.iter().cloned());
        }
        let vectors = checkpoint.tensors().filter(|info| info.shape.len() <= 1 && !seen.contains(&info.name));
        names.extend(vectors.map(|info| info.name.clone()));
        Ok(names)
    }

    fn description(&self, checkpoint: &Checkpoint, wanted: &Wanted, stored: &[String]) -> Result<Packed, RuntimeError> {
        let weights = wanted.forms.iter().map(|form| {
            let (decl, source) = self.ranks[0].sides[MAIN].weights.source(form.key)?;
            Ok(PackedWeight {
                weight: decl.name.clone(),
                source: form.key.1,
                layout: form.layout,
                dtype: source.dtype,
                shape: decl.shape.clone(),
                offset: 0,
                bytes: form.bytes,
            })
        });
        let weights = weights.collect::<Result<Vec<_>, RuntimeError>>()?;
        let stored: HashSet<&str> = stored.iter().map(String::as_str).collect();
        let absent = checkpoint.tensors().filter(|info| !stored.contains(info.name.as_str()));
        let absent =
            absent.map(|info| AbsentTensor { name: info.name.clone(), dtype: info.dtype, shape: info.shape.clone() });
        Ok(Packed::new(self.device().plugin().name(), weights, absent.collect()))
    }

    fn packed_bytes_of(&mut self, form: &Form) -> Result<Vec<u8>, RuntimeError> {
        let desc = BufferDesc::new(form.bytes, QHAL_USAGE_WEIGHT, Scope::Persistent, "packed weight");
        let on = &mut self.ranks[0].sides[MAIN];
        let target = on.device.alloc(&desc)?.whole();
        let mut bytes = vec![0; usize::try_from(form.bytes).unwrap_or(usize::MAX)];
        // What a device leaves unwritten, as padding, must not differ from run to run.
        on.stream.copy_from_host(&bytes, &target)?;
        on.weights.pack(&on.device, &on.stream, form.key, (&form.plan, form.input), &target)?;
        on.stream.copy_to_host(&target, &mut bytes)?;
        Ok(bytes)
    }
}
