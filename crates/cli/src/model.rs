//! From what `--model` says to files, tokenizer, template and an engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qwen_engine::{Engine, KvDType, LoadOptions, LoadStage, LoadedModel, MlaForm, PassName, Placement, Policy};
use qwen_formats::Checkpoint;
use qwen_models::hub::{self, Client, DownloadOptions, ModelSpec, Wanted};
use qwen_models::tokenizer::Tokenizer;

use crate::arguments::{KvCacheDtype, Precision, RuntimeArguments};
use crate::console::Progress;
use crate::dispatch;
use crate::error::CliError;
use crate::plugins;

/// The files of a model: a path as it is, or what its name stands for, fetched if it isn't there yet.
///
/// # Errors
/// If there is no such model, or it can't be fetched.
pub fn resolve(model: &str) -> Result<PathBuf, CliError> {
    fetch(model, false)
}

/// As [`resolve`]; `refresh` asks the hub again although the cache has an answer.
///
/// # Errors
/// As [`resolve`].
pub fn fetch(model: &str, refresh: bool) -> Result<PathBuf, CliError> {
    refuse_missing_file(model)?;
    let spec = ModelSpec::parse(model)?;
    let progress = Progress::bytes("fetching");
    let mut show = |at: hub::Progress<'_>| progress.file(at.file, at.done, at.total.unwrap_or(0));
    let mut options = DownloadOptions::new(&mut show);
    let cache = hub::cache_dir();
    match &spec {
        ModelSpec::Hub { source, repo, revision, file } if refresh => {
            let wanted = Wanted { repo, revision: revision.as_deref(), file: file.as_deref(), refresh };
            let source = hub::source_from_env(*source);
            Ok(hub::fetch_repository(&Client::new(), source.as_ref(), &wanted, &cache, &mut options)?)
        }
        _ => Ok(hub::resolve(&spec, &cache, &mut options)?),
    }
}

/// `folder/model.gguf` would be a repository's name too; whoever writes that means a file.
fn refuse_missing_file(model: &str) -> Result<(), CliError> {
    let path = Path::new(model);
    let is_file_name =
        ["gguf", "safetensors", "json"].iter().any(|wanted| path.extension().is_some_and(|e| e == *wanted));
    if is_file_name && !model.contains(':') && !path.exists() {
        return Err(CliError::input(
            model,
            "a file",
            "nothing of that name",
            "check the path, or name a hub's model as owner/name[:file]",
        ));
    }
    Ok(())
}

/// The tokenizer of a model; a file with nothing else is enough.
///
/// # Errors
/// If there is no such model, or it has no tokenizer that this program can read.
pub fn tokenizer(model: &str) -> Result<Tokenizer, CliError> {
    let path = resolve(model)?;
    if path.is_dir() {
        return Ok(Tokenizer::from_checkpoint_dir(&path)?);
    }
    if path.extension().is_some_and(|extension| extension == "json") {
        return Tokenizer::from_json_file(&path).map_err(CliError::within(&path));
    }
    from_gguf(&path)
}

fn from_gguf(path: &Path) -> Result<Tokenizer, CliError> {
    let checkpoint = Checkpoint::open(path)?;
    match checkpoint.metadata() {
        Some(metadata) => Tokenizer::from_gguf(metadata).map_err(CliError::within(path)),
        None => Err(CliError::input(
            path.display().to_string(),
            "a GGUF file, a tokenizer.json or a directory with one",
            "a safetensors file",
            "pass the directory that it lies in",
        )),
    }
}

/// What a command wants besides the runtime arguments.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// Tokens that the context must hold, if the user has not said how many it has.
    pub tokens: Option<usize>,
    /// Form of latent attention.
    pub mla_form: Option<MlaForm>,
    /// Keep the graph after this pass.
    pub dump_after: Option<PassName>,
    /// Most sequences of a step; the programs but the server run one conversation at a time.
    pub sequences: Option<u32>,
    /// Tokens that the cache holds over all sequences.
    pub cached_tokens: Option<u64>,
    /// Vectors of texts, besides answers.
    pub embeddings: bool,
}

/// The options of a load.
#[must_use]
pub fn options(runtime: &RuntimeArguments, wish: &Wish) -> LoadOptions {
    let wished = wish.tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
    LoadOptions {
        policy: policy(runtime.precision),
        kv_dtype: match runtime.kv_cache_dtype {
            KvCacheDtype::Auto => KvDType::Auto,
            KvCacheDtype::F32 => KvDType::F32,
            KvCacheDtype::F16 => KvDType::F16,
            KvCacheDtype::Bf16 => KvDType::Bf16,
        },
        max_seq_len: runtime.max_seq_len.or(wished),
        max_sequences: wish.sequences.unwrap_or(1),
        prefill_chunk_size: runtime.prefill_chunk_size,
        max_cached_tokens: wish.cached_tokens,
        mla_form: wish.mla_form,
        embeddings: wish.embeddings,
        dump_after: wish.dump_after,
    }
}

const fn policy(precision: Precision) -> Policy {
    match precision {
        Precision::Fast => Policy::Fast,
        Precision::Balanced => Policy::Balanced,
        Precision::Exact => Policy::Exact,
    }
}

/// Loads a model onto its device, with a progress bar on a terminal.
///
/// # Errors
/// If there is no such model, it is damaged or not supported, or memory is short.
pub fn load(model: &str, runtime: &RuntimeArguments, wish: &Wish) -> Result<Engine, CliError> {
    let path = resolve(model)?;
    let placement = plugins::place(&runtime.place, file_bytes(&path))?;
    load_on(&path, placement, &options(runtime, wish))
}

/// Bytes of a model's files, 0 where they can't be told.
#[must_use]
pub fn file_bytes(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries.filter_map(|entry| Some(size(&entry.ok()?.path()))).sum(),
        Err(_) => size(path),
    }
}

/// As [`load`], with files and devices at hand.
///
/// # Errors
/// As [`load`].
pub fn load_on(path: &Path, placement: Placement, options: &LoadOptions) -> Result<Engine, CliError> {
    load_files(path, placement, options).map(Engine::new)
}

/// As [`load_on`], before there is an engine.
///
/// # Errors
/// As [`load`].
pub fn load_files(path: &Path, placement: Placement, options: &LoadOptions) -> Result<LoadedModel, CliError> {
    dispatch::announce(path, &placement, options)?;
    let progress = Progress::steps("loading");
    let mut show = |stage| match stage {
        LoadStage::Opening => {}
        LoadStage::Weights { done, total } => progress.set(done as u64, total as u64),
    };
    Ok(LoadedModel::load(path, placement, options, &mut show)?)
}

/// The tokenizer of a loaded model.
///
/// # Errors
/// If it has none.
pub fn tokenizer_of(engine: &Engine, model: &str) -> Result<Arc<Tokenizer>, CliError> {
    engine.tokenizer().cloned().ok_or_else(|| {
        CliError::input(
            model,
            "a tokenizer",
            "none beside the weights",
            "put tokenizer.json into the model's directory",
        )
    })
}
