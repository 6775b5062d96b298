// light-dark() in the style follows color-scheme, which the button sets on the root; otherwise the system decides.
function themeButton() {
  const button = document.getElementById("theme");
  let dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => (button.textContent = dark ? "Light" : "Dark");
  button.addEventListener("click", () => {
    dark = !dark;
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    label();
  });
  label();
}
