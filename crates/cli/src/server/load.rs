//! From settings to a model that is served.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use qwen_engine::{DEFAULT_SEQ_LEN, Fleet, FleetOptions, GuardOptions, SamplingParams};
use qwen_models::chat_template::ChatTemplate;
use qwen_models::tokenizer::Tokenizer;
use qwen_server::answer::{THINK_BEGIN, THINK_END, ToolFormat};
use qwen_server::{ServedModel, ThinkingStyle};

use super::devices::{self, Common};
use super::options::Options;
use super::pooling;
use super::watch::dispatch_probe;
use crate::error::CliError;
use crate::generation_config::GenerationConfig;
use crate::model::{self, Wish};

/// Requests of the longest context that the cache has room for, where nothing is said.
const LONGEST_AT_A_TIME: u64 = 4;

/// Loads the model onto every device and starts the engines.
pub(super) fn load(options: &Options) -> Result<ServedModel, CliError> {
    let name = &options.model.model;
    let path = model::resolve(name)?;
    let pooling = pooling::of_model(&options.pooling, &path)?;
    let longest = options.runtime.max_seq_len.unwrap_or(DEFAULT_SEQ_LEN);
    let wish = Wish {
        sequences: Some(options.max_batch_size),
        cached_tokens: Some(options.kv_cache_tokens.unwrap_or(u64::from(longest) * LONGEST_AT_A_TIME)),
        embeddings: pooling.is_some(),
        ..Wish::default()
    };
    let common = Common {
        path: path.clone(),
        load: model::options(&options.runtime, &wish),
        guard: options.guard.then(GuardOptions::default),
    };
    let place = &options.runtime.place;
    let topology = devices::topology(options.topology.as_deref())?;
    let (instances, rates) = devices::instances(place, &common, &topology)?;
    let fleet = FleetOptions {
        max_in_flight: options.max_queue as usize,
        tests: options.guard.then(|| Duration::from_secs_f64(options.guard_interval.max(1.0))),
        stall: Duration::from_secs_f64(options.stall_timeout.max(1.0)),
        reference: devices::reference(place, &common),
        topology,
        ..FleetOptions::default()
    };
    let engine = Fleet::start(instances, fleet)?;
    let about = engine.about();
    let template = about.chat_template.as_deref();
    let tool_format = tool_format(&options.tool_call_parser, template)?;
    let thinking = thinking(&options.reasoning_parser, template, about.tokenizer.as_deref())?;
    let probed = engine.clone();
    let dispatch = dispatch_probe(engine.clone(), path.clone(), common.load.clone());
    let names = match options.served_model_name.as_slice() {
        [] => vec![served_name(name)],
        names => names.to_vec(),
    };
    Ok(ServedModel {
        names,
        defaults: GenerationConfig::read(&path).over(SamplingParams::default()),
        tool_format,
        thinking,
        pooling,
        dispatch,
        devices: Arc::new(move || devices::reports(&probed, &rates)),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        engine,
    })
}

/// The name of a model for clients: that of a hub as it is, that of a file without folders and ending.
fn served_name(model: &str) -> String {
    let path = Path::new(model);
    if !path.exists() {
        return model.to_owned();
    }
    let stem = if path.is_dir() { path.file_name() } else { path.file_stem() };
    stem.map_or_else(|| model.to_owned(), |stem| stem.to_string_lossy().into_owned())
}

fn tool_format(wanted: &str, template: Option<&ChatTemplate>) -> Result<Option<ToolFormat>, CliError> {
    match wanted {
        "none" => Ok(None),
        "auto" => Ok(template.and_then(|template| ToolFormat::detect(|text| template.mentions(text)))),
        name => ToolFormat::by_name(&name.replace('-', "_")).map(Some).ok_or_else(|| {
            let expected = format!("auto, none, {}", ToolFormat::names().join(", "));
            CliError::input("--tool_call_parser", expected, name, "leave it out to have it told by the chat template")
        }),
    }
}

fn thinking(
    wanted: &str,
    template: Option<&ChatTemplate>,
    tokenizer: Option<&Tokenizer>,
) -> Result<ThinkingStyle, CliError> {
    let mentions = |text: &str| template.is_some_and(|template| template.mentions(text));
    let switch = mentions("enable_thinking");
    let thinks = |always_inside| ThinkingStyle { thinks: true, always_inside, switch };
    match wanted {
        "none" => Ok(ThinkingStyle::default()),
        "auto" => {
            let knows = |text: &str| mentions(text) || tokenizer.is_some_and(|t| t.token_to_id(text).is_some());
            Ok(if knows(THINK_END) && knows(THINK_BEGIN) { thinks(false) } else { ThinkingStyle::default() })
        }
        "qwen3" => Ok(thinks(false)),
        "deepseek_r1" | "deepseek-r1" => Ok(thinks(true)),
        name => {
            let help = "leave it out to have it told by the chat template";
            Err(CliError::input("--reasoning_parser", "auto, none, qwen3 or deepseek_r1", name, help))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_for_clients() {
        assert_eq!(served_name("smollm2"), "smollm2");
        assert_eq!(served_name("Qwen/Qwen2.5-0.5B-Instruct"), "Qwen/Qwen2.5-0.5B-Instruct");
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf/llama.gguf");
        assert_eq!(served_name(file), "llama");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/qwen3");
        assert_eq!(served_name(folder), "qwen3");
    }

    #[test]
    fn templates_tell_what_a_model_can_do() {
        let template = |text: &str| ChatTemplate::new(text, Default::default()).unwrap();
        let qwen = template("{% if enable_thinking %}<think></think>{% endif %}<tool_call> arguments");
        assert_eq!(tool_format("auto", Some(&qwen)).unwrap(), Some(ToolFormat::Hermes));
        let style = thinking("auto", Some(&qwen), None).unwrap();
        assert!(style.thinks && style.switch && !style.always_inside);
        assert!(!thinking("auto", Some(&template("plain")), None).unwrap().thinks);
        assert!(tool_format("x", None).is_err() && thinking("x", None, None).is_err());
    }
}
