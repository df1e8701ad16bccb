"""Parts of the Keras callback."""
