# The public names with their types; __init__.py imports each when it is first used.
from sgl_kvtier.config import KVTierConfig as KVTierConfig
from sgl_kvtier.config import PolicyConfig as PolicyConfig
from sgl_kvtier.config import load_config as load_config
from sgl_kvtier.errors import KVTierError as KVTierError
from sgl_kvtier.policy import messages as messages
from sgl_kvtier.policy.planner import Planner as Planner
from sgl_kvtier.policy.shape import EngineShape as EngineShape
from sgl_kvtier.store.base import PutOutcome as PutOutcome
from sgl_kvtier.store.base import ReadOutcome as ReadOutcome
from sgl_kvtier.store.simple import Store as Store
from sgl_kvtier.store.simple import open_store as open_store
from sgl_kvtier.store.simple import page_key as page_key
from sgl_kvtier.types import Link as Link
from sgl_kvtier.types import PageKey as PageKey
from sgl_kvtier.types import Span as Span
from sgl_kvtier.types import Tier as Tier

__version__: str
__all__: list[str]
