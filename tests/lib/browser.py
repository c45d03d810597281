"""Pages as a browser shows them."""

import shutil
import subprocess

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def pixels(page, folder, size, *options):
    """The colors [height, width, 3], 0 to 255, of an HTML file, without a network.

    size: of the window, as "1200,1000".   options: further ones of the browser.
    """
    import matplotlib.image

    picture = folder / "page.png"
    subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *options,
            f"--window-size={size}",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
    )
    return (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
