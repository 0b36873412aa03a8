//! Sheets of chips, profiles of devices and decisions of dispatch, as commands and `QWEN_DEBUG_DISPATCH` use them.

use std::io::Write;
use std::path::{Path, PathBuf};

use qwen_chips::{Catalogue, Chip, Variable};
use qwen_dispatch::{Chooser, Decision, HardwareProfile, OpShape, ProbeOptions, ProfileCache};
use qwen_engine::{Explained, LoadOptions, Phase, Placement, PlannedOp, Symbol};
use qwen_hal::Device;
use qwen_hal::abi::{QHAL_KIND_NULL, QHAL_KIND_SIMULATED};
use serde::Serialize;

use crate::error::CliError;

/// Prints every decision while a model is loaded.
const DEBUG_VARIABLE: &str = "QWEN_DEBUG_DISPATCH";
/// A folder of sheets that replace built-in ones.
const CHIPS_VARIABLE: &str = "QWEN_CHIPS";

/// The sheets of chips: the built-in ones, and those of `QWEN_CHIPS`.
///
/// # Errors
/// If that folder or one of its sheets is refused.
pub fn catalogue() -> Result<Catalogue, CliError> {
    match std::env::var_os(CHIPS_VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => Ok(Catalogue::with_folder(&PathBuf::from(folder))?),
        None => Ok(Catalogue::built_in()?),
    }
}

/// The sheet of a device's chip, if there is one.
#[must_use]
pub fn chip_of<'a>(catalogue: &'a Catalogue, device: &Device) -> Option<&'a Chip> {
    let info = device.info();
    // A model's name comes before a colon of the fingerprint; several may be told, with slashes between them.
    let models = info.fingerprint.split_once(':').map_or("", |(models, _)| models).split('/');
    let named = models.filter(|name| !name.is_empty()).find_map(|name| catalogue.find(name));
    named.or_else(|| catalogue.recognise(&device.plugin().manifest().name, &[&info.name, &info.fingerprint]))
}

/// Where profiles are kept.
#[must_use]
pub fn profiles() -> ProfileCache {
    ProfileCache::new(qwen_models::hub::cache_dir().join("profiles"))
}

/// Threads of the host's pool that a device was opened with.
#[must_use]
pub fn threads(device: &Device) -> usize {
    device.plugin().host().threads()
}

/// Whether there is anything to measure: a device that computes nothing has no figures, and a simulated one only
/// the host's.
#[must_use]
pub fn is_measurable(device: &Device) -> bool {
    ![QHAL_KIND_NULL, QHAL_KIND_SIMULATED].contains(&device.info().kind)
}

/// The profile of a device, measured now if it is not known or `refresh` says so; none if it computes nothing.
///
/// # Errors
/// If the device fails while it is measured.
pub fn profile(device: &Device, refresh: bool) -> Result<Option<HardwareProfile>, CliError> {
    if !is_measurable(device) {
        return Ok(None);
    }
    Ok(Some(profiles().load_or_measure(device, threads(device), refresh, &ProbeOptions::default())?))
}

/// Takes the variants that were tuned for a device, if any were; nothing is measured.
pub fn use_tuned_variants(device: &Device) {
    let Some(profile) = profiles().load(device, threads(device)) else { return };
    let variants = profile.variants.into_iter();
    let variants = variants.filter_map(|(plan, name)| Some((u64::from_str_radix(&plan, 16).ok()?, name)));
    device.prefer(variants.collect::<Vec<_>>());
}

/// Sizes of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StepSize {
    /// `prefill` or `decode`.
    pub step: &'static str,
    /// Tokens of the step.
    pub tokens: u64,
    /// Tokens of the longest context.
    pub seq_len: u64,
}

impl StepSize {
    fn phase(self) -> Phase {
        if self.step == "decode" { Phase::Decode } else { Phase::Prefill }
    }
}

/// Who decides for each device of a placement.
#[derive(Debug)]
pub struct Choosers<'a> {
    own: Chooser<'a>,
    /// Of the device that helps out, if it has something to do.
    fallback: Option<Chooser<'a>>,
}

impl<'a> Choosers<'a> {
    /// For what was planned; a device that computes some of it is measured if it has no profile.
    ///
    /// # Errors
    /// If a device fails while it is measured.
    pub fn new(catalogue: &'a Catalogue, placement: &Placement, planned: &Explained) -> Result<Self, CliError> {
        Self::with(catalogue, placement, planned, |device| profile(device, false))
    }

    /// The same by the profiles that are known: nothing is measured.
    #[must_use]
    pub fn known(catalogue: &'a Catalogue, placement: &Placement, planned: &Explained) -> Self {
        let profile = |device: &Device| Ok(profiles().load(device, threads(device)));
        Self::with(catalogue, placement, planned, profile)
            .unwrap_or_else(|never: std::convert::Infallible| match never {})
    }

    fn with<E>(
        catalogue: &'a Catalogue,
        placement: &Placement,
        planned: &Explained,
        profile: impl Fn(&Device) -> Result<Option<HardwareProfile>, E>,
    ) -> Result<Self, E> {
        let chooser = |device: &Device| {
            let profile = profile(device)?;
            Ok(Chooser::new(device, chip_of(catalogue, device), profile.as_ref()))
        };
        let helps = planned.ops.iter().any(|op| op.on_fallback);
        let fallback = placement.fallback.as_ref().filter(|_| helps).map(chooser).transpose()?;
        Ok(Self { own: chooser(&placement.device)?, fallback })
    }

    /// Of the model's own device.
    #[must_use]
    pub const fn own(&self) -> &Chooser<'a> {
        &self.own
    }

    fn of(&self, op: &PlannedOp) -> &Chooser<'a> {
        self.fallback.as_ref().filter(|_| op.on_fallback).unwrap_or(&self.own)
    }
}

/// A decision and how often a step takes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Counted {
    /// Sizes of the step; none if it is told for every size.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub size: Option<StepSize>,
    /// Instructions of a step.
    pub instructions: usize,
    /// Where the first comes from.
    pub origin: String,
    /// The device that helps out computes it; the decision is that device's.
    pub on_fallback: bool,
    /// Why the model's own device does not compute it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// What is decided.
    #[serde(flatten)]
    pub decision: Decision,
}

/// The decisions for a step of this size, or, without a size, for every range of sizes; equal ones once.
#[must_use]
pub fn decisions(choosers: &Choosers<'_>, planned: &[PlannedOp], size: Option<StepSize>) -> Vec<Counted> {
    let mut counted: Vec<Counted> = Vec::new();
    for op in planned.iter().filter(|op| size.is_none_or(|size| serves(planned, op, size))) {
        let symbols: Vec<Option<Variable>> = op.symbols.iter().map(|symbol| variable(*symbol)).collect();
        let shape = OpShape {
            op: op.op,
            kernel: &op.kernel,
            variants: &op.variants,
            symbols: &symbols,
            values: &values(op, size),
            tuned: op.preferred,
        };
        for decision in choosers.of(op).decide(&shape) {
            let same = |known: &&mut Counted| {
                is_same(&known.decision, &decision, size)
                    && (known.on_fallback, &known.refused) == (op.on_fallback, &op.refused)
            };
            if let Some(known) = counted.iter_mut().find(same) {
                known.instructions += op.instructions;
                // Plans for larger steps go on where those for smaller ones end.
                known.decision.min = known.decision.min.min(decision.min);
                known.decision.max = known.decision.max.max(decision.max);
                continue;
            }
            let (origin, refused) = (op.origin.clone(), op.refused.clone());
            let (instructions, on_fallback) = (op.instructions, op.on_fallback);
            counted.push(Counted { size, instructions, origin, on_fallback, refused, decision });
        }
    }
    counted
}

/// Whether two decisions are one: for a size all must agree, without one the ranges of sizes are joined.
fn is_same(known: &Decision, other: &Decision, size: Option<StepSize>) -> bool {
    let ranges = |decision: &Decision| if size.is_some() { (decision.min, decision.max) } else { (None, None) };
    let alike = Decision { min: other.min, max: other.max, ..known.clone() };
    alike == *other && ranges(known) == ranges(other)
}

/// Whether a step of this size runs a plan: the smallest bucket that holds it, of its own phase or of both.
fn serves(planned: &[PlannedOp], op: &PlannedOp, size: StepSize) -> bool {
    let phase = size.phase();
    let of_phase = |of: Phase| of == Phase::Mixed || of == phase;
    let buckets = planned.iter().filter(|op| of_phase(op.phase)).map(|op| op.bucket);
    of_phase(op.phase) && buckets.filter(|bucket| u64::from(*bucket) >= size.tokens).min() == Some(op.bucket)
}

/// What a step of this size copies between devices, and exchanges between those of a group.
#[must_use]
pub fn transfers(planned: &Explained, size: StepSize) -> (usize, usize) {
    let phase = size.phase();
    let of_phase = planned.steps.iter().filter(|step| step.phase == Phase::Mixed || step.phase == phase);
    let holding = of_phase.filter(|step| u64::from(step.bucket) >= size.tokens);
    holding.min_by_key(|step| step.bucket).map_or((0, 0), |step| (step.crossings, step.exchanges))
}

const fn variable(symbol: Symbol) -> Option<Variable> {
    match symbol {
        Symbol::Tokens | Symbol::Rows => Some(Variable::Tokens),
        Symbol::Sequences => Some(Variable::Sequences),
        Symbol::Blocks | Symbol::CacheBlocks => None,
    }
}

fn values(op: &PlannedOp, size: Option<StepSize>) -> Vec<(Variable, u64)> {
    let mut values: Vec<(Variable, u64)> = Vec::new();
    values.extend(op.depth.map(|depth| (Variable::Depth, depth)));
    values.extend(op.width.map(|width| (Variable::Width, width)));
    if let Some(size) = size {
        // Of a prompt, the last row alone is wanted.
        let rows_alone = op.symbols.contains(&Symbol::Rows) && !op.symbols.contains(&Symbol::Tokens);
        values.push((Variable::Tokens, if rows_alone { 1 } else { size.tokens }));
        values.push((Variable::Sequences, 1));
        if op.op.contains("attention") {
            values.push((Variable::SeqLen, size.seq_len));
        }
    }
    values
}

/// With `QWEN_DEBUG_DISPATCH=1`: prints the three lines of each distinct decision to standard error, before the model is loaded.
///
/// # Errors
/// If a sheet is refused, a device can't be measured, or the model can't be planned.
pub fn announce(path: &Path, placement: &Placement, options: &LoadOptions) -> Result<(), CliError> {
    if std::env::var_os(DEBUG_VARIABLE).is_none_or(|value| value != "1") {
        return Ok(());
    }
    let catalogue = catalogue()?;
    let planned = qwen_engine::explain(path, placement.clone(), options)?;
    let choosers = Choosers::new(&catalogue, placement, &planned)?;
    let mut told: Vec<[String; 3]> = Vec::new();
    let mut err = std::io::stderr().lock();
    for counted in decisions(&choosers, &planned.ops, None) {
        let lines = counted.decision.lines();
        if !told.contains(&lines) {
            lines.iter().try_for_each(|line| writeln!(err, "{line}"))?;
            told.push(lines);
        }
    }
    Ok(())
}
