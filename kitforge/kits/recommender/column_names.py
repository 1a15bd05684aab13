"""What the names of columns say: whether they hold ids or quantities, users, items, times or the label.

camelCase and separators divide a name into words, and a type suffix of RecBole (`user_id:token`) is not part of it.
"""

import re
from typing import Literal

NameKind = Literal["id", "category", "quantity"]
LABELS = frozenset((
    "label", "labels", "click", "clicks", "clicked", "isclick", "isclicked", "clk", "target", "y", "income",
    "isconverted", "converted", "conversion",
))  # fmt: skip
USERS = (
    "userid", "user", "uid", "users", "customerid", "customer", "visitorid", "visitor", "memberid", "member",
    "reviewerid", "reviewer", "buyerid", "buyer", "accountid", "account", "clientid", "client", "playerid", "player",
    "listenerid", "viewerid", "viewer", "personid", "person", "profileid", "subscriberid", "msno", "sessionid",
    "session",
)  # fmt: skip
ITEMS = (
    "itemid", "item", "iid", "items", "movieid", "movie", "productid", "product", "parentasin", "asin", "sku",
    "skuid", "articleid", "article", "newsid", "news", "bookid", "book", "isbn", "songid", "song", "trackid", "track",
    "videoid", "video", "gameid", "game", "businessid", "business", "adid", "ad", "creativeid", "postid", "recipeid",
    "recipe", "listingid", "listing", "hotelid", "hotel", "venueid", "venue", "poiid", "poi", "courseid", "course",
    "goodsid", "goods", "offerid", "offer", "contentid", "artistid", "artist", "appid", "app", "stockcode",
)  # fmt: skip
TIMES = (
    "timestamp", "time", "ts", "datetime", "eventtime", "date", "createdat", "eventtimestamp", "unixtime",
    "unixreviewtime", "reviewtime", "eventdate", "occurredat",
)  # fmt: skip
_TIME_WORDS = ("timestamp", "time", "ts", "datetime", "date", "at")
# Words of a name that say what whole numbers in it are.
_CATEGORIES = frozenset((
    "brand", "category", "cate", "cat", "campaign", "advertiser", "publisher", "site", "domain", "device", "city",
    "country", "region", "state", "zip", "zipcode", "postcode", "postal", "code", "hour", "weekday", "month", "dow",
    "segment", "cluster", "segid", "type", "class", "os", "browser", "channel", "store", "shop", "seller", "merchant",
    "vendor", "genre", "tag", "language", "gender", "occupation", "adgroup", "group", "creative", "page", "query",
    "keyword", "customer", "user", "item", "visitor", "product", "movie", "author", "creator", "artist", "album",
    "warehouse", "branch", "department", "dept", "industry", "job", "cookie", "ip",
))  # fmt: skip
_QUANTITIES = frozenset((
    "price", "age", "count", "counts", "cnt", "num", "number", "amount", "total", "sum", "avg", "mean", "max", "min",
    "duration", "length", "size", "weight", "height", "width", "depth", "distance", "quantity", "qty", "cost",
    "revenue", "sales", "salary", "balance", "score", "rating", "ratings", "rate", "ratio", "percent", "pct", "year",
    "years", "days", "hours", "minutes", "seconds", "views", "clicks", "impressions", "likes", "visits", "timestamp",
    "time", "hits", "gain", "loss", "temperature", "latitude", "longitude", "lat", "lon", "volume", "mileage",
    "budget", "income", "spend", "spent", "age", "stars", "stock", "population", "frequency", "bid", "paid", "fnlwgt",
    "power", "speed", "area", "level",
))  # fmt: skip
# English words that end as an id does.
_NO_IDS = frozenset((
    "bid", "paid", "unpaid", "prepaid", "grid", "valid", "invalid", "solid", "liquid", "fluid", "rapid", "acid",
    "avoid", "void", "aid", "raid", "maid", "kid", "lid", "mid", "hybrid", "android", "covid", "humid", "vivid",
    "squid", "braid", "afraid", "stupid", "orchid", "plaid",
))  # fmt: skip
_NUMBERED = re.compile(r"^C\d+$", re.IGNORECASE)  # a category of a log without names
_TYPES: dict[str, NameKind] = {"token": "id", "token_seq": "id", "float": "quantity", "float_seq": "quantity"}


def without_type(name: str) -> str:
    """A name without the type suffix of RecBole."""
    plain, _, suffix = name.rpartition(":")
    return plain if plain and suffix in _TYPES else name


def name_words(name: str) -> list[str]:
    """The words of a name in lower case: userID and user_id:token are user, id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", without_type(name))
    return [word.lower() for word in re.split(r"[\W_]+", spaced) if word]


def plain_name(name: str) -> str:
    """The words of a name without anything between them: userid."""
    return "".join(name_words(name))


def is_time_name(name: str) -> bool:
    """Whether numbers as large as Unix times have that meaning in a column: timestamp, review_time, created_at."""
    return plain_name(name) in TIMES or name_words(name)[-1:] in [[word] for word in _TIME_WORDS]


def id_kind_of(name: str) -> NameKind | None:
    """What a column of whole numbers holds by its name: ids of users or things, a category, a quantity; None where the
    name says nothing."""
    suffix = name.rpartition(":")[2]
    if ":" in name and suffix in _TYPES:
        return _TYPES[suffix]
    words, plain = name_words(name), plain_name(name)
    if not words:
        return None
    last = words[-1]
    is_id = last in ("id", "ids", "uuid", "guid") or (re.search(r".ids?$", last) and last not in _NO_IDS)
    if is_id or plain in USERS or plain in ITEMS or last in ("user", "item"):
        return "id"
    if last not in _CATEGORIES and _QUANTITIES & set(words):
        return "quantity"
    return "category" if _CATEGORIES & set(words) or _NUMBERED.match(name) else None


# Labels of two texts: which of them is positive.
_POSITIVE = frozenset((
    "1", "true", "t", "yes", "y", "positive", "pos", "clicked", "click", "bought", "buy", "purchase", "purchased",
    "converted", "conversion", "like", "liked", "good", "success", "successful", "won", "win", "relevant", "accepted",
    "accept", "subscribed", "watched", "viewed", "opened", "on", "ja", "oui", "si", "sí", "sì", "sim",
    "tak", "да", "是", "はい",
))  # fmt: skip
_NEGATIVE = frozenset((
    "0", "-1", "false", "f", "no", "n", "negative", "neg", "none", "dislike", "disliked", "bad", "failure", "fail",
    "failed", "lost", "lose", "off", "nein", "nee", "nej", "non", "não", "nao", "nie", "нет", "否", "不是", "いいえ",
))  # fmt: skip


def positive_of(first: str, second: str) -> tuple[str, str] | None:
    """The positive one of two labels, and the negative one; None where they do not say."""
    signs = [_sign(first), _sign(second)]
    if signs in ([1, -1], [1, 0], [0, -1]):
        return first, second
    if signs in ([-1, 1], [0, 1], [-1, 0]):
        return second, first
    # Ranges: more than a threshold is positive.
    if first.startswith(">") != second.startswith(">") and {first[:1], second[:1]} == {">", "<"}:
        return (first, second) if first.startswith(">") else (second, first)
    return None


def _sign(text: str) -> int:
    """1 for a positive word, -1 for a negative one, 0 for any other."""
    word = text.strip().strip(".!").lower()
    parts = re.split(r"[\s_-]+", word, maxsplit=1)
    if word in _NEGATIVE or (len(parts) == 2 and parts[0] in ("not", "no", "non", "never", "un", "did")):
        return -1
    if word in _POSITIVE:
        return 1
    is_negated = any(word.startswith(start) and word[len(start) :] in _POSITIVE for start in ("un", "non", "no", "not"))
    return -1 if is_negated and len(word) > 4 else 0
