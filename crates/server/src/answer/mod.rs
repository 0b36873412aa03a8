//! From the text of a model to what an API speaks of: thinking, content, calls of tools.
//!
//! In: text in pieces of any size. Out: [`Piece`]s. One parser serves streams and whole answers: the pieces of the same text,
//! put together, are the same however it was cut (property-tested). Nothing is dropped but markup and the white space around
//! it; what looks like a call and is none comes out as content, unless the answer was cut within markup, or in an
//! object that names a tool.

mod json;
mod parser;
mod tools;

pub use parser::{AnswerParser, ParserOptions, Thinking};
pub use tools::{Force, ToolFormat, forced_calls, free_calls};

/// Begins thinking.
pub const THINK_BEGIN: &str = "<think>";
/// Ends thinking.
pub const THINK_END: &str = "</think>";

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Thinking.
    Reasoning(String),
    /// What is meant for the reader.
    Content(String),
    /// A call begins; calls are numbered from 0.
    CallBegin {
        /// Number of the call.
        index: usize,
        /// Tool.
        name: String,
    },
    /// More of a call's arguments: together a JSON text.
    CallArguments {
        /// Number of the call.
        index: usize,
        /// Text.
        text: String,
    },
}

/// An answer put together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Whole {
    /// Thinking.
    pub reasoning: String,
    /// Content.
    pub content: String,
    /// Calls: tool and arguments.
    pub calls: Vec<(String, String)>,
}

impl Whole {
    /// Adds a piece.
    pub fn add(&mut self, piece: &Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(text),
            Piece::Content(text) => self.content.push_str(text),
            Piece::CallBegin { name, .. } => self.calls.push((name.clone(), String::new())),
            Piece::CallArguments { index, text } => {
                if let Some((_, arguments)) = self.calls.get_mut(*index) {
                    arguments.push_str(text);
                }
            }
        }
    }
}
