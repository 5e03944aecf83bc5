"""The small tokenizer of the builtin models: byte-level BPE, one token a digit, chat roles as special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))
PLAIN_TOKENS = ("<calc>", "</calc>", "####")
"""Single tokens that are nevertheless text: decoding keeps them even where special tokens are left out."""
VOCABULARY = 1024
CONTEXT = 1024
SHIPPED = Path(__file__).parent / "tiny"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_WORDS = """
the a to of and in is for he she it they has have had his her their how many much does did do each per day week month
year hour minute if on at from with was were will be are that then than more less as after before all total left
remaining cost costs price dollars dollar cents cent money buy buys bought sell sells sold pay pays paid spend spends
spent save saved earn earns make makes made give gives gave get gets got take takes took eat eats ate one two three
four five six seven eight nine ten half twice double third quarter times every other another same first second last next
number amount average sum difference rest some any only also but so what when which who there this these those by an not
no out up into over under still now later again back down about both between together altogether same whole
apples oranges eggs books pages pens pencils cards marbles stickers toys boxes box bags bag bottles cups cookies
candies candy cakes cake pizza slices slice flowers trees fish dogs cats chickens cows animals cars bus miles mile
feet foot inches pounds pound ounces gallons kilometers meters speed long tall old years hours minutes days weeks months
seconds people students children kids friends friend boys girls class school teacher store shop farm work works worked
worker workers home house room party game games team player players points score ball balls shirts shoes pairs pair
dozen percent discount tax rate profit salary needs need wants want uses used use start starts started end
ends finish finished add adds added puts put gets gone goes go going went comes came run runs ran walk walks drives
drove reads read writes write plays played find finds found keep keeps kept lost loses lose wins won share shared
shares sharing equally split divided fill filled filled holds hold contains contain weigh weighs weight large small
big little new high low most least enough extra full empty single different own
John Mary Tom Tim James Sarah Mike Anna Lisa Jack Jane Bob Alice Sam Ben Kate Emily David Peter Mark Paul Amy Joe
Janet Jerry Maria Carlos Josh Wendi Kylar Toulouse Lily Max Mia Leo Eva Noah Emma Liam Olivia Lucy Henry George Nina
Monday Tuesday Wednesday Thursday Friday Saturday Sunday morning afternoon evening night today tomorrow yesterday
How If What The She He They Each There It In On At After When His Her For A An Then So This
Solve Answer Question answer question solve calculator result number equals plus minus divided error expression
ing ed er est ly tion ment ness ful able ible al ous ive ize ise ated ates ate ents ent ant ance ence ity ies ied
re un in im dis con com pro pre ex de sub per ad ap ac st th ch sh wh br cr dr fr gr pr tr bl cl fl gl pl sl sp sc sk
an en in on un ar er ir or ur al el il ol ul at et it ot ut ag eg ig og ug ap ep ip op up ack ick ock uck ell ill all
ound ight ought ould ear eat eam ake ame ate ace age ain air are ool oom oon oor ong ing ang ung and end ind ond
"""


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocabulary`` ids trained on ``texts`` and a list of common English words.

    Byte-level, so that any text can be encoded; digits and punctuation marks are never merged. The same texts give
    the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+|\d| ?[^\s\p{L}\d]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(PLAIN_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *_common_words()], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def builtin_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer that comes with the package."""
    return PreTrainedTokenizerFast.from_pretrained(SHIPPED)


def _common_words() -> Iterator[str]:
    """Each word of the list often enough to be merged, the earlier the more often, as inside a sentence."""
    words = list(dict.fromkeys(_WORDS.split()))
    for rank, word in enumerate(words):
        yield f" {word}" * (20 + 600 // (rank + 1))
