//! The OpenAPI document, made of the handlers' own descriptions, and the page that shows it.

use serde_json::Value;
use utoipa::openapi::path::PathItem;
use utoipa::openapi::schema::{AnyOfBuilder, ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{OpenApi as Document, OpenApiVersion, Ref, RefOr, SecurityRequirement};
use utoipa::{Modify, OpenApi};

use crate::{anthropic, openai, ops, responses};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "qwen-server",
        description = "LLM inference with the protocols of OpenAI and Anthropic. Unknown parameters are ignored and named in \
                       the response header x-ignored-parameters; parameters that are understood but not supported are \
                       refused with code unsupported_parameter."
    ),
    paths(
        openai::chat::chat,
        openai::completions::completions,
        openai::embeddings::embeddings,
        openai::models::list,
        openai::models::card,
        responses::respond,
        anthropic::messages,
        anthropic::count_tokens,
        openai::tokenize::tokenize,
        openai::tokenize::detokenize,
        ops::health::live,
        ops::health::ready,
        ops::health::healthz,
        ops::figures,
        ops::version,
        ops::load,
        ops::status::status,
        ops::admin::drain,
        ops::admin::cancel,
    ),
    modifiers(&Keys, &Streams)
)]
struct Api;

struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut Document) {
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("key", bearer);
        // Needed only where the server was started with keys.
        document.security =
            Some(vec![SecurityRequirement::default(), SecurityRequirement::new("key", Vec::<String>::new())]);
    }
}

/// Streams: the handlers name what an event's data holds as JSON; the document describes the event around it, for which OpenAPI has
/// item schemas since 3.2.
struct Streams;

const STREAM: &str = "text/event-stream";

impl Modify for Streams {
    fn modify(&self, document: &mut Document) {
        document.openapi = OpenApiVersion::Version32;
        let schemas = document.components.clone().unwrap_or_default().schemas;
        for operation in document.paths.paths.values_mut().filter_map(|item: &mut PathItem| item.post.as_mut()) {
            let responses = operation.responses.responses.values_mut();
            let contents = responses.filter_map(|response| match response {
                RefOr::T(response) => response.content.get_mut(STREAM),
                RefOr::Ref(_) => None,
            });
            for content in contents {
                let RefOr::T(content) = content else { continue };
                let Some(RefOr::Ref(data)) = content.schema.take() else { continue };
                let name = data.ref_location.rsplit('/').next().unwrap_or_default();
                let event = match schemas.get(name).map(names).unwrap_or_default() {
                    names if names.is_empty() => unnamed_event(data),
                    names => named_event(names, data),
                };
                content.item_schema = Some(event);
            }
        }
    }
}

/// The words that `type` may be in a schema of several forms.
fn names(schema: &RefOr<Schema>) -> Vec<Value> {
    let RefOr::T(Schema::OneOf(forms)) = schema else { return Vec::new() };
    let of_form = |form: &RefOr<Schema>| match form {
        RefOr::T(Schema::Object(form)) => match form.properties.get("type") {
            Some(RefOr::T(Schema::Object(kind))) => kind.enum_values.clone(),
            _ => None,
        },
        _ => None,
    };
    forms.items.iter().filter_map(of_form).flatten().collect()
}

fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String)
}

fn json(schema: impl Into<RefOr<Schema>>) -> ObjectBuilder {
    text().content_media_type("application/json").content_schema(Some(schema))
}

/// An event that is called as the `type` of its data.
fn named_event(names: Vec<Value>, data: Ref) -> RefOr<Schema> {
    let event = ObjectBuilder::new().schema_type(Type::Object);
    let event = event.property("event", text().enum_values(Some(names))).required("event");
    event.property("data", json(data)).required("data").into()
}

/// An event of OpenAI's older protocols: a chunk, an error, or the end.
fn unnamed_event(chunk: Ref) -> RefOr<Schema> {
    let value = OneOfBuilder::new().item(chunk).item(Ref::from_schema_name("ErrorBody"));
    let end = text().enum_values(Some(["[DONE]"]));
    let data = AnyOfBuilder::new().item(json(value)).item(end);
    ObjectBuilder::new().schema_type(Type::Object).property("data", data).required("data").into()
}

/// The document.
#[must_use]
pub fn document() -> Document {
    Api::openapi()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::input::parameters::{Handling, Parameters};

    fn whole() -> Value {
        serde_json::to_value(document()).unwrap()
    }

    /// Names of a schema's properties, through references and compositions.
    fn properties(document: &Value, schema: &Value, names: &mut BTreeSet<String>) {
        if let Some(reference) = schema["$ref"].as_str() {
            properties(document, document.pointer(reference.trim_start_matches('#')).unwrap(), names);
        }
        names.extend(schema["properties"].as_object().into_iter().flat_map(|map| map.keys().cloned()));
        for part in schema["allOf"].as_array().into_iter().flatten() {
            properties(document, part, names);
        }
    }

    /// Every property of a request's schema is a parameter that is used.
    fn described<P: Parameters>(path: &str) {
        let document = whole();
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let mut names = BTreeSet::new();
        properties(&document, schema, &mut names);
        assert!(names.len() > 1, "{path} has no schema");
        for name in names {
            assert_eq!(P::handling(&name), Some(Handling::Used), "{path}: {name}");
        }
    }

    #[test]
    fn tables_and_schemas_say_the_same() {
        described::<openai::chat::ChatParameters>("/v1/chat/completions");
        described::<openai::completions::CompletionParameters>("/v1/completions");
        described::<openai::embeddings::EmbeddingParameters>("/v1/embeddings");
        described::<responses::ResponsesParameters>("/v1/responses");
        described::<anthropic::MessagesParameters>("/v1/messages");
        described::<openai::tokenize::TokenizeParameters>("/tokenize");
    }

    /// A line for each operation, response and schema.
    fn outline(document: &Value) -> String {
        let names = |value: &Value| -> String {
            value.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>().join(" ")).unwrap_or_default()
        };
        let mut text = String::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let mut given = BTreeSet::new();
                let body = &operation["requestBody"]["content"]["application/json"]["schema"];
                properties(document, body, &mut given);
                let given: Vec<_> = given.into_iter().collect();
                text += &format!("{} {path}: {}\n", method.to_uppercase(), given.join(" "));
                for (status, response) in operation["responses"].as_object().unwrap() {
                    let content = response["content"].as_object().into_iter().flatten().map(|(kind, content)| {
                        let data = content.pointer("/itemSchema/properties/data").unwrap_or(&Value::Null);
                        let [of_all, of_json] = [data, &data["anyOf"][0]].map(|data| &data["contentSchema"]);
                        let places = [&content["schema"], of_all, &of_json["oneOf"][0]];
                        let schema = places.iter().find_map(|schema| schema["$ref"].as_str()).unwrap_or_default();
                        format!("{kind} {}", schema.rsplit('/').next().unwrap_or_default())
                    });
                    text += &format!("  {status}: {}\n", content.collect::<Vec<_>>().join(", "));
                }
            }
        }
        for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
            text += &format!("{name}: {}\n", names(&schema["properties"]));
        }
        text
    }

    #[test]
    fn the_document_changes_on_purpose_only() {
        insta::assert_snapshot!("openapi", outline(&whole()));
    }

    #[test]
    fn every_operation_documents_its_errors() {
        for (path, operations) in whole()["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let responses = operation["responses"].as_object().unwrap();
                let refused =
                    responses.keys().any(|status| status.starts_with('4')) || path == "/livez" || path == "/readyz";
                assert!(refused, "{method} {path} documents no 4xx");
            }
        }
    }
}
