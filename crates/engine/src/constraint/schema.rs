//! What the choices of a JSON schema come to where several hold at once.
//!
//! In: a schema of whoever asks. Out: a number, or a sentence that refuses it. llguidance writes out each choice of an `anyOf` with each of
//! every other `anyOf` beside it (in `allOf`, behind `$ref`, or in the same schema), and each of these with all its properties: ten
//! choices of two are a thousand schemas. Choices that are not beside each other are what the text says, and not counted.
//! References are followed if they lead into the same schema by a path; the work of others is limited as that of any grammar.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Most schemas within schemas that choices may come to: each costs about 50 microseconds.
pub(super) const MAX_PARTS: u64 = 8192;

/// Properties that cost as much as a schema of their own where they are written once more.
const OPTIONAL_IN_A_PART: u64 = 8;

const KINDS: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
/// Keywords that say nothing of a value.
const NOTES: [&str; 15] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
];

/// What there is of one kind of value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size {
    alternatives: u64,
    /// Schemas within all alternatives together.
    parts: u64,
}

impl Size {
    const NONE: Self = Self { alternatives: 0, parts: 0 };

    const fn plus(self, other: Self) -> Self {
        Self {
            alternatives: self.alternatives.saturating_add(other.alternatives),
            parts: self.parts.saturating_add(other.parts),
        }
    }

    /// Each alternative with each of the other.
    const fn times(self, other: Self) -> Self {
        let own = self.parts.saturating_mul(other.alternatives);
        Self {
            alternatives: self.alternatives.saturating_mul(other.alternatives),
            parts: own.saturating_add(other.parts.saturating_mul(self.alternatives)),
        }
    }
}

/// By kind of value: those of different kinds never hold at once.
type Sizes = [Size; 6];

/// Anything: changes nothing that it stands beside.
const ANY: Sizes = [Size { alternatives: 1, parts: 0 }; 6];

fn each(a: Sizes, b: Sizes, f: impl Fn(Size, Size) -> Size) -> Sizes {
    std::array::from_fn(|kind| f(a[kind], b[kind]))
}

fn total(sizes: Sizes) -> Size {
    sizes.into_iter().fold(Size::NONE, Size::plus)
}

/// What holds of a value at the same time.
enum Holds<'a> {
    /// Keywords of the schema itself.
    Own(Sizes),
    All(&'a Value),
    One(&'a [Value]),
    Referred(&'a str),
}

/// Schemas within schemas that a schema's choices come to, where they come to the most.
pub(super) fn parts_combined(schema: &Value) -> u64 {
    let mut schemas = Schemas { root: schema, referred: HashMap::new(), most: 0 };
    schemas.sizes(schema, false);
    schemas.most
}

struct Schemas<'a> {
    root: &'a Value,
    /// Set to [`ANY`] while it is looked at, which ends circles.
    referred: HashMap<&'a str, Sizes>,
    most: u64,
}

impl<'a> Schemas<'a> {
    /// Sizes of a schema. A reference by itself is written once, wherever it is named; beside others it is written out.
    fn sizes(&mut self, schema: &'a Value, is_beside: bool) -> Sizes {
        let Some(object) = schema.as_object() else {
            return if schema == &Value::Bool(false) { [Size::NONE; 6] } else { ANY };
        };
        let mut holds = Vec::new();
        if let Some(own) = self.own(object) {
            holds.push(Holds::Own(own));
        }
        for (keyword, value) in object {
            match (keyword.as_str(), value) {
                ("allOf", Value::Array(all)) => holds.extend(all.iter().map(Holds::All)),
                ("anyOf" | "oneOf", Value::Array(options)) => holds.push(Holds::One(options)),
                ("$ref", Value::String(path)) => holds.push(Holds::Referred(path)),
                // Of no use to anybody, so what it is among is looked at by itself.
                ("$defs" | "definitions", Value::Object(defined)) => {
                    for schema in defined.values() {
                        self.sizes(schema, false);
                    }
                }
                _ => {}
            }
        }
        let is_beside = is_beside || holds.len() > 1;
        let (mut product, mut choices) = (ANY, 0);
        for held in holds {
            let sizes = match held {
                Holds::Own(sizes) => sizes,
                Holds::All(schema) => self.sizes(schema, is_beside),
                Holds::One(options) => {
                    let none = [Size::NONE; 6];
                    options.iter().fold(none, |sum, option| each(sum, self.sizes(option, is_beside), Size::plus))
                }
                Holds::Referred(path) => self.referred(path, is_beside),
            };
            choices += usize::from(sizes.iter().any(|size| size.alternatives > 1));
            product = each(product, sizes, Size::times);
        }
        if choices > 1 {
            self.most = self.most.max(total(product).parts);
        }
        product
    }

    /// What the keywords of a schema say that are about one kind of value each; none if there are none.
    fn own(&mut self, object: &'a Map<String, Value>) -> Option<Sizes> {
        let others = ["allOf", "anyOf", "oneOf", "$ref"];
        let says = |keyword: &String| !NOTES.contains(&keyword.as_str()) && !others.contains(&keyword.as_str());
        if !object.keys().any(says) {
            return None;
        }
        let is_named = |kind: &str, name: &Value| name == kind || kind == "number" && name == "integer";
        let mut sizes: Sizes = std::array::from_fn(|kind| match object.get("type") {
            Some(Value::Array(names)) if !names.iter().any(|name| is_named(KINDS[kind], name)) => Size::NONE,
            Some(name @ Value::String(_)) if !is_named(KINDS[kind], name) => Size::NONE,
            _ => Size { alternatives: 1, parts: 1 },
        });
        // One of so many properties is that many schemas, each with all properties.
        if let Some(Value::Object(properties)) =
            object.get("properties").filter(|_| object.contains_key("minProperties"))
        {
            let count = properties.len() as u64;
            self.most = self.most.max(count.saturating_mul(count) / OPTIONAL_IN_A_PART);
        }
        let named = |keyword: &str| object.get(keyword).and_then(Value::as_object).into_iter().flat_map(Map::values);
        let listed = |keyword: &str| object.get(keyword).and_then(Value::as_array).into_iter().flatten();
        let single = |keyword: &str| object.get(keyword).into_iter();
        let of_arrays = listed("prefixItems").chain(listed("items")).chain(single("items"));
        let of_objects = named("properties").chain(named("patternProperties")).chain(single("additionalProperties"));
        let (arrays, objects): (Vec<&Value>, Vec<&Value>) = (of_arrays.collect(), of_objects.collect());
        for (kind, within) in [(4, arrays), (5, objects)] {
            for schema in within {
                let parts = total(self.sizes(schema, false)).parts;
                sizes[kind].parts = sizes[kind].parts.saturating_add(parts.saturating_mul(sizes[kind].alternatives));
            }
        }
        if let Some(values) = object.get("enum").and_then(Value::as_array) {
            sizes = each(
                sizes,
                values.iter().map(constant).fold([Size::NONE; 6], |a, b| each(a, b, Size::plus)),
                Size::times,
            );
        }
        if let Some(value) = object.get("const") {
            sizes = each(sizes, constant(value), Size::times);
        }
        Some(sizes)
    }

    fn referred(&mut self, path: &'a str, is_beside: bool) -> Sizes {
        let sizes = match self.referred.get(path) {
            Some(sizes) => *sizes,
            None => {
                self.referred.insert(path, ANY);
                let schema = path.strip_prefix('#').and_then(|path| self.root.pointer(path));
                let sizes = schema.map_or(ANY, |schema| self.sizes(schema, true));
                self.referred.insert(path, sizes);
                sizes
            }
        };
        if is_beside { sizes } else { ANY }
    }
}

fn constant(value: &Value) -> Sizes {
    let kind = match value {
        Value::Null => 0,
        Value::Bool(_) => 1,
        Value::Number(_) => 2,
        Value::String(_) => 3,
        Value::Array(_) => 4,
        Value::Object(_) => 5,
    };
    let mut sizes = [Size::NONE; 6];
    sizes[kind] = Size { alternatives: 1, parts: 1 };
    sizes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A choice of so many objects.
    fn choice(name: &str, options: usize) -> Value {
        let option = |i: usize| json!({"type": "object", "properties": {format!("{name}{i}"): {"type": "string"}}});
        json!({"anyOf": (0..options).map(option).collect::<Vec<_>>()})
    }

    fn choices(count: usize, options: usize) -> Value {
        json!({"type": "object", "allOf": (0..count).map(|i| choice(&format!("k{i}_"), options)).collect::<Vec<_>>()})
    }

    #[test]
    fn choices_beside_each_other_are_multiplied() {
        // Two schemas in each option, and the one around them.
        assert_eq!(parts_combined(&choices(2, 3)), 9 * (2 * 2 + 1));
        assert_eq!(parts_combined(&choices(10, 2)), 1024 * (2 * 10 + 1));
        assert_eq!(parts_combined(&choices(100, 2)), u64::MAX);
        let beside = json!({"anyOf": choice("a", 4)["anyOf"], "oneOf": choice("b", 5)["anyOf"]});
        assert_eq!(parts_combined(&beside), 20 * 4);
        let referred = json!({"$defs": {"a": choice("a", 4), "b": choice("b", 5)}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]});
        assert_eq!(parts_combined(&referred), 20 * 4);
        let within = json!({"type": "array", "items": choices(10, 2)});
        assert_eq!(parts_combined(&within), 1024 * 21);
    }

    #[test]
    fn what_is_not_combined_counts_for_nothing() {
        for schema in [
            json!(true),
            json!({"type": "object", "properties": {"a": choice("a", 500), "b": choice("b", 500)}}),
            choice("a", 4000),
            // What holds of texts has nothing to do with what holds of objects.
            json!({"allOf": [choice("a", 500), {"type": ["string", "object"]}]}),
            json!({"enum": (0..4000).collect::<Vec<_>>()}),
        ] {
            assert!(parts_combined(&schema) <= MAX_PARTS, "{}", parts_combined(&schema));
        }
        // Each names the next twice, and none is beside another.
        let twice = |i: usize| {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            (format!("d{i}"), json!({"anyOf": [next.clone(), next]}))
        };
        let mut defined: Map<String, Value> = (0..60).map(twice).collect();
        defined.insert("d60".into(), json!({"type": "string"}));
        assert_eq!(parts_combined(&json!({"$defs": defined, "$ref": "#/$defs/d0"})), 0);
        let tree = json!({"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"});
        assert_eq!(parts_combined(&tree), 0);
    }

    #[test]
    fn one_of_many_properties_is_a_choice() {
        let properties = |count: usize| (0..count).map(|i| (format!("p{i}"), json!({}))).collect::<Map<_, _>>();
        let schema =
            |count| json!({"properties": properties(count), "minProperties": 1, "additionalProperties": false});
        assert!(parts_combined(&schema(200)) <= MAX_PARTS);
        assert!(parts_combined(&schema(1000)) > MAX_PARTS);
    }

    #[test]
    fn what_people_write_stays_within() {
        assert!(parts_combined(&choices(8, 2)) <= MAX_PARTS);
        assert!(parts_combined(&choices(5, 3)) <= MAX_PARTS);
        assert!(parts_combined(&choices(2, 30)) <= MAX_PARTS);
        assert!(parts_combined(&choices(10, 2)) > MAX_PARTS);
    }
}
