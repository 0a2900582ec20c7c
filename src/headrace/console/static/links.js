// Addresses of pages: everything that is shown has one.

const word = encodeURIComponent;
const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
};

export const topicLink = (topic, tab = "", values = {}) => `#/topics/${word(topic)}${tab ? `/${tab}` : ""}${query(values)}`;
export const messageLink = (topic, partition, offset) => `#/topics/${word(topic)}/messages/${partition}/${offset}`;
export const subscriptionLink = (name, topic) => `#/subscriptions/${word(name)}${query({ topic })}`;
export const lettersLink = (name, values = {}) => `#/dead-letters/${word(name)}${query(values)}`;
