"""Encodings of text files: which one a file is in, and the decoding of its lines.

A file is in the encoding in which most of its characters beyond ASCII are common ones of Chinese,
Japanese or English. `python -m benchmarks.encodings` compares that with the detectors of other
packages; results: benchmarks/results/encodings.md.
"""

import codecs
import io
from collections import Counter
from collections.abc import Sequence
from typing import IO

from data_prep.config import Encoding

CODECS: dict[Encoding, str] = {
    "utf-8": "utf-8",
    "gb18030": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc-jp": "euc_jp",
    "windows-1252": "cp1252",
    "utf-16-le": "utf-16-le",
    "utf-16-be": "utf-16-be",
}
"""Python's codecs, of several the one that reads most: Hong Kong's Big5, Windows' Shift-JIS."""
UTF_16: tuple[Encoding, ...] = ("utf-16-le", "utf-16-be")
"""A line feed's byte is part of other characters here: see `as_utf8`."""
_MARKS: dict[bytes, Encoding] = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_LEAST_SHARE = 0.4  # Korean read as GB18030 has up to 0.36, classical Chinese from 0.5
_LEAST_WESTERN = 0.7
_LEAST_KANA = 0.15
_MOST_WESTERN = 0.06  # more is another language, perhaps not a Western one
_EVIDENCE_BYTES = 1 << 17
_CERTAIN_BYTES = 12
_STEP = 1 << 16

# The 800 most frequent characters of Chinese texts (news, laws, stories, wikis; 93% of what is in
# them), and of the same texts in Traditional Chinese.
_HAN = set(
    "一七万三上下不与专且世业东两严並个中临为主举么义之乎九也乡书买了予争事二于互五些交产享京亲人"
    "什今仍从他付代令以们仲件价任份企众优伙会传伤估似但佈位低住体何作你使來例供依侵便係促保信修個"
    "倍們候债值假做停健偿備储傳債傷像僑價償優儲儿元充先光免兒入內全兩八公六共关其具养兽内冊册再写"
    "军农决况准减几凭出分切刊刑划列则创初判別利别到制券剂則前副創劃劑力办功加务动助励劳動務勝勞勵"
    "包化北匯区医區十千升半华协協单卖南博占卫印危即却卷卻历原去县参參又及双反发取受变口古另只可台"
    "号司吃各合同名后向否听告员呢周命和品响員售商問善單器嚴四回因团围国图國圍圖團土在地场均坏型城"
    "域執培基堅報場境增壞士声处备复外多够夠夥大天太夫央失头女她好如妆妝始委婚婦嫌子字存学學它守安"
    "完官定实审客宣室害家容密察實審寫对导封将將專對導小少尚就局居屆届展属履屬山工己已市布师带師席"
    "帶常干平年并幾广序库应底府废度庭康廢廣延建开异式引张張強强当录形影役往征待很律後得從復微徵德"
    "心必志快态怎思急性总息患情想意愛感愿態憑應成我戒或战戰戲戶户房所手才打托扣执批承技投抗护报抵"
    "押担拍拒招括持指按损换据授排採接控推措提換援損撤播擔據支收改放政故效救教数整數文料断新斷方於"
    "施族无日旧时明易是显時普景更書曾最會月有服期木未本术机权材村条来東极构林果某染查标校样核根格"
    "案档條检植業極構標模樣樹機檔檢權次款止正此步武歷歸死殊殘段毁每毒比民气氣水求汇汙污決沒没油治"
    "況法注洋活派流测济海消涉深清減測港游源準满滿演澳濟火灾点為烈無然照熱營爆爭爱片版物特犯状狀独"
    "獨獲率环现現理環生產用由申电界留畜畫異當疑疗疫疾病療登發白百的益监監盤目直相省看真眼眾着督知"
    "矿研破确碍確礦示社神票禁离私种科秘租积称移稅程税種稱稽積究空立站章競符第等筑答策签简算管節範"
    "篇簡簽类精系糾紀約納級紛素索細終組結絕給統經綜維網線編縣總織繳繼續纠约级纪纳纷线组织终经结给"
    "络绝统继续维编缴网罚罢罪置罰罷美群義習老考者而职联聯聲職聽股育能自至致臺與興舉航般舶船良色艺"
    "节花若英范草药获華营萬落著藏藝藥處虚虛號虽融血行術衛补表被裁装補裝裡製複西要見規視親覺觀见观"
    "规视觉解言訂計訊訓託記訟設許訴註評詢試話該誌認語說調談請論證識警譯議護讀變讓计订认让训议记许"
    "论讼设证评识诉译试话询该语误说请读调象負財貨責買費資賠賣質賬購负财责账货质购费资赔走起超足路"
    "身車軍較載輛輸轄轉车转轻载较辆输辖辦辩農边达过运近还这进违连述追退送适选這通造連週進遇遊運過"
    "道達違遗適遵選遺避還邊那部都鄉配醫采释釋里重野量金鉴銀銷錄錢錯鎮鑑钱银销错镇長长門開間關门问"
    "间队防附际陈降限院陣除险陳隊階随隐隔際障隨險难集雖雙離難零電需震青非面革響項須預領頭題額類顯"
    "项须预领题额風风飞食飼養館饲馆首香馬駛驗马驶验體高麼點黨鼓"
)
_PUNCTUATION = set("，。、；：？！“”‘’（）《》〈〉「」『』【】〔〕…—·～％＋－＝／　")
_FULL_WIDTH = {chr(0xFEE0 + code) for code in (*range(0x30, 0x3A), *range(0x41, 0x7B))}
_KANA = {chr(code) for code in range(0x3041, 0x30FF)}
_CHINESE = _HAN | _PUNCTUATION | _FULL_WIDTH
_JAPANESE = _CHINESE | _KANA
# Without â and the euro sign, which with them are the bytes of UTF-8's curly quotes.
_WESTERN = set("éèàçüöäñêôîïëÉ“”‘’–—…•°§©®£\xa0·½¼¾×")
_COMMON: dict[Encoding, set[str]] = {
    "gb18030": _CHINESE,
    "big5": _CHINESE,
    "shift_jis": _JAPANESE,
    "euc-jp": _JAPANESE,
    "windows-1252": _WESTERN,
}
# A3 A0: a space (https://encoding.spec.whatwg.org/#index-gb18030), a private character in Python.
_GB18030_SPACE = ("\ue5e5", "\u3000")
_CONTROLS = bytes(range(32))
_NO_SPACES = bytes({*range(32)} - {*range(9, 14)})
_COMMON_OF_UTF_16 = _JAPANESE | _WESTERN | {chr(code) for code in range(0x21, 0x7F)}


def detect(head: bytes, others: Sequence[bytes] = ()) -> Encoding | None:
    """Find the encoding of a file by its beginning and `others` of its parts; None if none fits.

    ASCII is UTF-8. Text with bytes that are not UTF-8 is UTF-8 if it has more characters that are.
    """
    if head.startswith(codecs.BOM_UTF32_LE):
        return None  # begins with UTF-16's mark, and is not it
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    parts = (head, *others)
    odd = _odd_lines(parts)
    has_zeros = head.count(0) * 10 > len(head)
    if not odd and not has_zeros:
        return "utf-8"
    shares: dict[Encoding, float] = {each: _share_of_utf_16(head, each) for each in UTF_16}
    if not has_zeros:
        seen = Counter(odd.decode("utf-8", "replace"))
        num_bad = seen.pop("\ufffd", 0)
        # A character of three bytes counts as three: other encodings hardly ever have such a one.
        if sum(n * (1 + 2 * (c > "\u07ff")) for c, n in seen.items() if c > "\x7f") > num_bad:
            return "utf-8"
        shares |= {encoding: _share(odd, encoding) for encoding in _COMMON}
        if sum(map(_num_odd, parts)) > _MOST_WESTERN * sum(map(len, parts)):
            del shares["windows-1252"]
    best = max(shares, key=lambda encoding: shares[encoding])
    least = _LEAST_WESTERN if best == "windows-1252" else _LEAST_SHARE
    return best if shares[best] >= least else None


def of_lines(encoding: Encoding) -> Encoding:
    """Return the encoding of the lines of a file, which is UTF-8 where `as_utf8` reads it."""
    return "utf-8" if encoding in UTF_16 else encoding


def _odd_lines(parts: Sequence[bytes]) -> bytes:
    """Join the lines that are not ASCII, up to a limit in each part."""
    limit = _EVIDENCE_BYTES // len(parts)
    return b"\n".join(
        b"\n".join(line for line in part.split(b"\n") if not line.isascii())[:limit]
        for part in parts
    ).strip(b"\n")


def _num_odd(part: bytes) -> int:
    return len(part) - len(part.translate(None, bytes(range(128, 256))))


def _share(odd: bytes, encoding: Encoding) -> float:
    """Return the share of common characters among those beyond ASCII; bad bytes are none."""
    seen = Counter(odd.decode(CODECS[encoding], "replace"))
    beyond = {c: n for c, n in seen.items() if c > "\x7f"}
    total = sum(beyond.values())
    common = sum(n for c, n in beyond.items() if c in _COMMON[encoding])
    if encoding == "windows-1252":
        return common / total
    kana = sum(n for c, n in beyond.items() if c in _KANA)
    if _COMMON[encoding] is _JAPANESE and kana < _LEAST_KANA * total:
        return 0.0
    return common / (total + 2)  # one or two characters may be anything


def _share_of_utf_16(head: bytes, encoding: Encoding) -> float:
    """Return the share of common characters among all but spaces."""
    text = head[:_EVIDENCE_BYTES].decode(encoding, "replace")
    seen = {c: n for c, n in Counter(text).items() if not c.isspace()}
    common = sum(n for c, n in seen.items() if c in _COMMON_OF_UTF_16)
    return common / (sum(seen.values()) or 1)


class LongLine(bytes):
    """The beginning of a line that is too long to be read; does not decode."""

    num_bytes = 0
    """Of the whole line."""


def decode(raw: bytes, encoding: Encoding) -> str | None:
    """Decode a line, without a byte-order mark; None if it has invalid bytes, or is too long."""
    try:
        # A line of UTF-8 in a file of another encoding is invalid, though its bytes may have a
        # meaning there. A short one is taken for what the file is: GB18030 and UTF-8 share some.
        if isinstance(raw, LongLine) or (encoding != "utf-8" and _is_surely_utf8(raw)):
            return None
        # UTF-16 of many scripts is valid UTF-8: letters, and control characters between them.
        if encoding == "utf-8" and raw.isascii() and 4 * _num_controls(raw) > len(raw) > 4:
            return None
        text = raw.decode(CODECS[encoding]).removeprefix("\ufeff")
        return text.replace(*_GB18030_SPACE) if encoding == "gb18030" else text
    except UnicodeDecodeError:
        return None


def _num_controls(raw: bytes) -> int:
    """Count control characters, white space only beside bytes of 0, which no text has."""
    return len(raw) - len(raw.translate(None, _CONTROLS if b"\0" in raw else _NO_SPACES))


def _is_surely_utf8(raw: bytes) -> bool:
    try:
        return len(raw) >= _CERTAIN_BYTES <= _num_odd(raw) and bool(raw.decode())
    except UnicodeDecodeError:
        return False


def invalid_line(encoding: Encoding) -> str:
    """Return the reason for rejecting a line that cannot be decoded."""
    return f"invalid {encoding.upper()} line"


def as_utf8(stream: IO[bytes], encoding: Encoding) -> IO[bytes]:
    """Read a stream of UTF-16 as UTF-8; what is not valid becomes bytes that are not either."""
    return io.BufferedReader(_AsUtf8(stream, encoding), _STEP)


class _AsUtf8(io.RawIOBase):
    def __init__(self, stream: IO[bytes], encoding: Encoding) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(CODECS[encoding])("surrogatepass")
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = b""
        while not self._waiting:
            data = self._stream.read(_STEP)
            try:
                self._waiting = self._decoder.decode(data, not data).encode(errors="surrogatepass")
            except UnicodeDecodeError:  # half a character at the end
                self._waiting = b"\xff"
                self._decoder.reset()
            if not data:
                break
        given, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(given)] = given
        return len(given)


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON may hold but UTF-8 cannot store."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
