//! How the text of a token stands for bytes.
//!
//! Byte-level vocabularies (GPT-2 and its descendants) write every byte as one printable
//! character; SentencePiece vocabularies write a space as U+2581 and have tokens `<0x00>` to
//! `<0xFF>` for bytes that no other token covers.

/// The character that SentencePiece writes for a space.
pub(super) const SPACE_MARK: char = '\u{2581}';

/// The writing of a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alphabet {
    /// One character per byte.
    ByteLevel,
    /// Plain text with a mark for spaces and tokens for bytes.
    SentencePiece {
        /// A space put before the text when encoding is taken off again when decoding.
        strip_leading_space: bool,
    },
}

impl Alphabet {
    /// Bytes that an ordinary token stands for. A byte-level token with characters outside the
    /// alphabet stands for its own text, as the Hugging Face decoder has it.
    pub(super) fn bytes_of(self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => token
                .chars()
                .map(byte_of_char)
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| token.as_bytes().to_vec()),
            Self::SentencePiece { .. } => match byte_of_token(token) {
                Some(byte) => vec![byte],
                None => token.replace(SPACE_MARK, " ").into_bytes(),
            },
        }
    }

    /// The text of the token that stands for exactly this byte.
    pub(super) fn token_of_byte(self, byte: u8) -> String {
        match self {
            Self::ByteLevel => char_of_byte(byte).to_string(),
            Self::SentencePiece { .. } => format!("<0x{byte:02X}>"),
        }
    }

    pub(super) fn strips_leading_space(self) -> bool {
        self == Self::SentencePiece { strip_leading_space: true }
    }
}

/// Byte of a `<0xHH>` token.
fn byte_of_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // The parser would take a sign.
    (digits.len() == 2 && !digits.starts_with('+')).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Printable Latin-1 stands for itself; the 68 other bytes, in order, are U+0100 and up.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

pub(crate) fn char_of_byte(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let rank = match byte {
        0x00..=0x20 => u32::from(byte),
        0x7F..=0xA0 => u32::from(byte) - 0x7F + 33,
        _ => 67,
    };
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn byte_of_char(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ 0..=0xFF => u8::try_from(code).ok().filter(|&byte| is_printable(byte)),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255u8 {
            let character = char_of_byte(byte);
            assert_eq!(byte_of_char(character), Some(byte), "{byte:#x} is written {character:?}");
            assert!(!character.is_whitespace() && !character.is_control());
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(byte_of_char(' '), None);
        assert_eq!(byte_of_char('中'), None);
    }

    #[test]
    fn byte_tokens_of_sentencepiece() {
        let alphabet = Alphabet::SentencePiece { strip_leading_space: true };
        for byte in 0..=255u8 {
            assert_eq!(alphabet.bytes_of(&alphabet.token_of_byte(byte)), [byte]);
        }
        assert_eq!(alphabet.bytes_of("▁a▁"), b" a ");
        assert_eq!(alphabet.bytes_of("<0x+1>"), b"<0x+1>".to_vec());
    }
}
