"""Pages by key on a local disk, verified when they are read: python examples/use_the_store.py"""

import tempfile

from sgl_kvtier import open_store, page_key

with (
    tempfile.TemporaryDirectory() as folder,
    open_store(folder, identity={"model": "m", "dtype": "bf16"}) as store,
):
    store.put({page_key("a page"): b"its bytes" * 1000})
    data = store.get(page_key("a page"))
    print(len(data or b""), "bytes are back; another page:", store.get(page_key("another")))
