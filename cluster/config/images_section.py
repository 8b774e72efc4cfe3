"""The `serve.images` section of the YAML: limits of images in requests. Knows nothing of the code that enforces it."""

from pydantic import Field

from workers.section import Section


class ImagesConfig(Section):
    """Limits of images, for models with a vision tower. A request beyond a limit gets a 4xx error that names it."""

    max_images: int = Field(16, ge=0, description="Images of one request.")
    max_image_bytes: int = Field(
        20 * 1024 * 1024, ge=1024, description="Bytes of the file of one image."
    )
    max_source_pixels: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="Width times height of an image, or of a frame of a video, as it was sent; checked before it is "
        "decoded.",
    )
    max_body_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1024,
        description="Largest request body with images and videos in it; all else of it has "
        "serve.limits.max_body_bytes.",
    )
    max_open_bytes: int = Field(
        2 * 1024**3,
        ge=1024 * 1024,
        description="Bytes of the pixels of images and videos of all open requests in one HTTP process, which keeps "
        "them until the answers end; more get a 429.",
    )
    min_pixels: int | None = Field(
        None, ge=1, description="Smaller images are enlarged; null = as the checkpoint has it."
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="Larger images are reduced; null = as the checkpoint has it, which is also the most.",
    )
    fetch_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for the images and videos that a request names by http(s) URLs.",
    )
