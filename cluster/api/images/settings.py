"""Which images and videos an ingress takes, and how they become patches, as plain data. Knows nothing of the YAML."""

from dataclasses import dataclass, field

from cluster.api.images.geometry import Geometry
from cluster.api.images.medium import MediaKind
from cluster.api.videos.settings import VideoSettings


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The images of a model with a vision tower, and the limits of one ingress.

    token_id           placeholder of an image in a prompt
    videos             None: the model takes none, for the reason in `no_videos`
    max_images         of one request
    max_request_tokens   of all images and videos of one request, which a rank keeps at once; None: no limit
    max_image_bytes    of the file of one image
    max_source_pixels  width times height of one image, or of a frame of a video, as it was sent
    max_body_bytes     of a body with its images and videos
    max_open_bytes     of the patches of all open requests; also of all fetched files of requests in preparation
    allowed_domains    hosts of http(s) URLs, `*.example.com` for all hosts below, `*` for all; empty: no such URL
    allowed_folder     of file:// URLs; None: no such URL
    fetch_timeout_s    of all fetches of one request together
    """

    token_id: int
    geometry: Geometry = field(default_factory=Geometry)
    videos: VideoSettings | None = None
    no_videos: str = ""
    max_images: int = 16
    max_request_tokens: int | None = None
    max_image_bytes: int = 20 * 1024 * 1024
    max_source_pixels: int = 64 * 1024 * 1024
    max_body_bytes: int = 64 * 1024 * 1024
    max_open_bytes: int = 2 * 1024**3
    allowed_domains: tuple[str, ...] = ()
    allowed_folder: str | None = None
    fetch_timeout_s: float = 10.0

    @property
    def token_ids(self) -> dict[MediaKind, int]:
        """Placeholders of images, and of parts of videos."""
        of_videos = self.token_id if self.videos is None else self.videos.token_id
        return {"image": self.token_id, "video": of_videos}
